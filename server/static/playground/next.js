// What comes next: the likeliest tokens after the prompt, and the probability with which the current
// settings draw each.

import { postJson } from "../common/api.js";
import { byId, clone, showError } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { drawProbabilities } from "./sampler.js";
import { visible } from "../common/token_text.js";

const KNOWN = 4096; // tokens that are asked for, the most that the server gives
const SHOWN = 10;
const FILTERS = ["temperature", "top_k", "top_p", "min_p"];

let settings;
let card;
let prompt = ""; // the text of the shown tokens, or of those that are asked for
let latest = null; // the last request
let tokens = [];

/** Offer the bars for a model whose attention can be explained. They follow these settings. */
export function start(served, run) {
  card = served;
  settings = run.settings;
  byId("upcoming").hidden = !card.has_attention || card.config.encoder !== null;
  byId("upcoming").addEventListener("toggle", () => {
    prompt = null; // ask again after a failure
    refresh();
  });
  byId("prompt").addEventListener("change", refresh);
}

/** Draw the bars if they are open, and fetch the tokens before if they are another prompt's. */
export async function refresh() {
  const text = byId("prompt").value;
  if (!byId("upcoming").open) return;
  if (text === prompt) return draw();
  prompt = text;
  const own = (latest = Symbol());
  let [found, problem] = [[], ""];
  try {
    const body = { model: card.model, text, layers: [0], heads: [0], top_k: KNOWN };
    if (text) ({ next_tokens: found } = await postJson("explain", body));
  } catch (error) {
    problem = error.message;
  }
  if (own !== latest) return;
  tokens = found;
  showError(byId("upcoming-error"), problem);
  draw();
}

/** Draw the bars by the current settings. Of equal settings they are equal. */
function draw() {
  const values = Object.fromEntries(FILTERS.map((name) => [name, settings.value(name)]));
  if (Object.values(values).some(Number.isNaN)) return; // a number is being written
  const logits = tokens.map((token) => Math.log(token.probability));
  const shares = drawProbabilities(logits, values);
  const rows = tokens.slice(0, SHOWN).map(({ text, probability }, i) => {
    const parts = {
      name: visible(text),
      raw: [{ style: { width: `${100 * probability}%` } }],
      own: [{ style: { width: `${100 * shares[i]}%` } }],
      percent: formatShare(shares[i]),
    };
    return clone("upcoming-template", parts, { class: shares[i] === 0 && "dropped" });
  });
  byId("upcoming-tokens").replaceChildren(...rows);
  const kept = shares.filter((share) => share > 0).length;
  const rest = Math.max(0, 1 - tokens.reduce((sum, { probability }) => sum + probability, 0));
  const unknown = `; the others, ${formatShare(rest)} of the model's probability, do not count here`;
  byId("upcoming-kept").textContent = tokens.length
    ? `${kept} of the ${tokens.length} likeliest tokens can be drawn` +
      `${tokens.length < card.config.vocab_size ? unknown : ""}.`
    : "";
}
