// A drawing of a model from top to bottom. It is made of lists, so that it can also be read aloud.

import { innerWidth, isGated, stepsOf } from "./anatomy.js";
import { make } from "../common/dom.js";
import { formatCount } from "../common/format.js";

/** Return the drawing. Its lines and arrows are in model.css. */
export const drawArchitecture = (config) => drawPath(stepsOf(config), config);

const drawPath = (steps, config) =>
  make("ol", { class: "path" }, ...steps.map((step) => drawStep(step, config)));

function drawStep({ kind, title, notes, times, steps, branches }, config) {
  if (times) {
    const caption = `× ${formatCount(times)} ${times === 1 ? "layer" : "layers"}`;
    const name = make("span", { class: "caption" }, caption);
    return make("li", { class: "repetition" }, name, drawPath(steps, config));
  }
  if (branches) {
    const paths = branches.map((branch) => drawPath(branch, config));
    const plus = make("span", { class: "plus", role: "img", "aria-label": "plus the input" }, "+");
    return make("li", { class: "residual" }, make("div", { class: "branches" }, ...paths), plus);
  }
  const picture = { attention: drawHeads, "feed-forward": drawWidths }[kind]?.(config) ?? "";
  const lines = notes.map((note) => make("p", {}, note));
  return make("li", { class: `box ${kind}` }, make("b", {}, title), picture, ...lines);
}

/** Draw query heads above the key-value heads that they share. */
function drawHeads({ n_head: heads, n_kv_head: shared }) {
  const queries = () => Array.from({ length: heads / shared }, () => make("i", { class: "query" }));
  const group = () => make("span", {}, ...queries(), make("i", { class: "key-value" }));
  const style = { "--heads": heads / shared, "--groups": shared };
  return make("div", { class: "heads", style }, ...Array.from({ length: shared }, group));
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
