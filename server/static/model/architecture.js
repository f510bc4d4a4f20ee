// A drawing of a model from top to bottom. It is made of lists, so that it can also be read aloud.

import { innerWidth, isGated, memoryOf, stepsOf } from "./anatomy.js";
import { make } from "../common/dom.js";

/** Return the drawing. Its lines and arrows are in model.css. */
export const drawArchitecture = (config) => drawPath(stepsOf(config), config);

const drawPath = (steps, config) =>
  make("ol", { class: "path" }, ...steps.map((step) => drawStep(step, config)));

function drawStep({ kind, title, notes, caption, steps, branches }, config) {
  if (caption) {
    const name = make("span", { class: "caption" }, caption);
    return make("li", { class: "repetition" }, name, drawPath(steps, config));
  }
  if (branches) {
    const paths = branches.map((branch) => drawPath(branch, config));
    const plus = make("span", { class: "plus", role: "img", "aria-label": "plus the input" }, "+");
    return make("li", { class: "residual" }, make("div", { class: "branches" }, ...paths), plus);
  }
  const pictures = PICTURES[kind]?.map((draw) => draw(config)).filter(Boolean) ?? [];
  const lines = notes.map((note) => make("p", {}, note));
  return make("li", { class: `box ${kind}` }, make("b", {}, title), ...pictures, ...lines);
}

/** Draw query heads above the key-value heads that they share, or the two parts of a latent. */
function drawHeads({ n_head: heads, n_kv_head: shared, latents, rotary_dim: turned }) {
  const queries = () => Array.from({ length: heads / shared }, () => make("i", { class: "query" }));
  const columns = latents && `${latents.rank}fr ${turned}fr`;
  const parts = latents ? ["latent", "turned"].map((part) => make("i", { class: part })) : [];
  const kept = () => make("i", { class: "key-value", style: { "--parts": columns } }, ...parts);
  const group = () => make("span", {}, ...queries(), kept());
  const style = { "--heads": heads / shared, "--groups": shared };
  return make("div", { class: "heads", style }, ...Array.from({ length: shared }, group));
}

/** Draw a matrix for each head of a state, in its proportions, or the tokens of a convolution. */
function drawState(config) {
  const { matrices, rows, columns, kernel } = memoryOf(config);
  const size = (length) => `${matrices ? (1.5 * length) / Math.max(rows, columns) : 0.5}rem`;
  const style = { height: size(rows), width: size(columns) };
  const part = () => make("i", { class: "state", style });
  return make("div", { class: "states" }, ...Array.from({ length: matrices || kernel - 1 }, part));
}

/** Draw a square for each expert, filled for those of a token, and a bar for the one of all. */
function drawExperts({ n_experts: all, n_experts_per_token: chosen, d_expert: width, ...config }) {
  if (all === null) return null;
  const squares = Array.from({ length: all }, (_, i) =>
    make("i", { class: i < chosen ? "expert chosen" : "expert" }),
  );
  const times = (config.d_shared_expert ?? 0) / width;
  const shared = times ? [make("i", { class: "shared", style: { "--times": times } })] : [];
  return make("div", { class: "experts" }, ...squares, ...shared);
}

/** Draw bars as wide as the input, the inner layer and the output. */
function drawWidths(config) {
  const widths = { outer: config.d_model, inner: innerWidth(config) };
  const most = Math.max(...Object.values(widths));
  const bar = (name) =>
    make("i", { class: name, style: { width: `${(80 * widths[name]) / most}%` } });
  const names = ["outer", "inner", ...(isGated(config) ? ["inner"] : []), "outer"];
  return make("div", { class: "widths" }, ...names.map(bar));
}

const PICTURES = {
  attention: [drawHeads],
  recurrence: [drawState],
  "feed-forward": [drawExperts, drawWidths],
};
