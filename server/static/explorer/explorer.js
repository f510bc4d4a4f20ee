// The attention explorer: a text, one head in detail, all heads as thumbnails, and the next token.

import { showAlignment } from "./alignment.js";
import { Palette, themeColours } from "../common/colours.js";
import { byId, make } from "../common/dom.js";
import { fetchMissing, explainText } from "./explanations.js";
import { showFormula } from "./formula.js";
import { HeadView } from "./head_view.js";
import { Heads } from "./heads.js";
import { showNextTokens } from "./next_tokens.js";
import { maskOf } from "./weights.js";

const MAX_OVERVIEW_WEIGHTS = 2 ** 22; // of all heads together: four responses

let card;
let view;
let layerHeads;
let overview;
let palette;
let requestedInput = null; // { text, ids }; ids only if tokens were appended one by one
let shownInput = null; // input of the shown explanation
let explanation = null; // the shown explanation
let selected = { layer: 0, head: 0 }; // the selected head
let shownSelection = selected; // the drawn head
let rejected = null; // the state to restore with a new key, after a 401
let job = null; // aborts the current load: only the last one counts

export function start(modelCard) {
  card = modelCard;
  if (!card.has_attention) return showUnavailable();
  view = new HeadView();
  layerHeads = new Heads(byId("heads"), "head-of-layer", card.config.n_head > 12 ? 60 : 92, select);
  overview = new Heads(byId("overview"), "head-of-all", card.config.n_head > 12 ? 26 : 44, select);
  overview.setHeads(range(card.config.n_layer), range(card.config.n_head), false);
  fillSelect("layer", card.config.n_layer);
  fillSelect("head", card.config.n_head);
  const { pooling, encoder } = card.config;
  byId("next-card").hidden = pooling !== null || encoder !== null; // no token may be appended
  colour();
  byId("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    explain({ text: byId("explain-text").value });
  });
  byId("explain-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey))
      byId("explain-form").requestSubmit();
  });
  byId("emphasise").addEventListener("change", colour);
  byId("overview-details").addEventListener("toggle", load);
  window.addEventListener("kvasir:theme", colour);
  window.addEventListener("kvasir:new-key", retryWithKey);
}

/** Explain the text in the input when the view is first shown. */
export function show() {
  if (card.has_attention && !requestedInput) explain({ text: byId("explain-text").value });
}

function showUnavailable() {
  const isOff = card.explain_limits === null;
  document.querySelector("header a[href='#attention']").hidden = isOff;
  byId("explain-form").hidden = true;
  byId("attention-missing").hidden = false;
  byId("attention-missing").textContent = isOff
    ? "Explanations are switched off on this server."
    : card.device === "cpu"
      ? "This model directory has no attention.onnx. Export the model again with kvasir export."
      : "Attention weights are available on CPU only: serve an export made with --device cpu.";
}

const range = (count) => Array.from({ length: count }, (_, i) => i);

function fillSelect(id, count) {
  byId(id).replaceChildren(...range(count).map((i) => make("option", { value: i }, `${i}`)));
  byId(id).addEventListener("change", () =>
    select(Number(byId("layer").value), Number(byId("head").value)),
  );
}

function colour() {
  palette = new Palette(byId("emphasise").checked);
  draw();
}

function explain(input) {
  requestedInput = input;
  load();
}

function retryWithKey() {
  if (!rejected) return;
  ({ requestedInput, selected } = rejected);
  load();
}

function append(token) {
  byId("explain-text").value = explanation.text + token.text;
  explain({ text: byId("explain-text").value, ids: [...explanation.ids, token.token_id] });
}

function select(layer, head) {
  selected = { layer, head };
  draw();
  load();
}

/**
 * Fetch what is missing, in this order: the text, the selected head, the rest of its layer, all
 * layers.
 */
async function load() {
  job?.abort();
  const controller = new AbortController();
  job = controller;
  rejected = null;
  byId("explain-error").hidden = true;
  byId("explained").setAttribute("aria-busy", "true");
  try {
    await loadMissing({
      signal: controller.signal,
      onwait: showWaiting,
      limits: card.explain_limits,
    });
  } catch (error) {
    if (!controller.signal.aborted) showError(error);
  }
  if (job === controller) byId("explained").removeAttribute("aria-busy");
}

async function loadMissing(options) {
  if (explanation?.text !== requestedInput.text) {
    byId("explain-status").textContent = "Explaining…";
    explanation = await explainText(requestedInput.text, selected.layer, selected.head, options);
    showText();
  }
  const { layer, head } = selected;
  const { n_layer: nLayer, n_head: nHead } = card.config;
  const chosenFirst = [head, ...range(nHead).filter((other) => other !== head)];
  await fetchMissing(explanation, [layer], chosenFirst, options, draw);
  const isSmall = nLayer * nHead * explanation.perHead <= MAX_OVERVIEW_WEIGHTS;
  if (byId("overview-details").open && isSmall)
    await fetchMissing(explanation, range(nLayer), range(nHead), options, draw);
  byId("overview-note").textContent = isSmall
    ? "One row per layer, the first layer at the top."
    : "One row per layer. The text is too long to fetch all heads at once: a layer is drawn " +
      "after you select it, as long as the page still holds its weights.";
}

/** Show an error and return to what was shown before. */
function showError(error) {
  if (error.status === 401) rejected = { requestedInput, selected };
  requestedInput = shownInput;
  selected = shownSelection;
  showStatus();
  draw();
  byId("explain-error").hidden = false;
  byId("explain-error").textContent = error.message;
}

function showWaiting(error) {
  byId("explain-status").textContent = `Waiting: ${error.message}`;
}

function showStatus() {
  const { max_tokens: most } = card.explain_limits;
  byId("explain-status").textContent = explanation
    ? `${explanation.n} of at most ${most} tokens`
    : "";
}

/** Update everything that depends on the text alone. */
function showText() {
  shownInput = requestedInput;
  byId("explained").hidden = false;
  showStatus();
  showNextTokens(byId("next-tokens"), byId("next-rest"), explanation.nextTokens, append);
  const { ids } = requestedInput;
  const isResplit =
    ids && (ids.length !== explanation.n || ids.some((id, i) => id !== explanation.ids[i]));
  byId("next-note").hidden = !isResplit;
  byId("next-note").textContent = isResplit
    ? "The tokenizer splits the extended text differently: the tokens shown are not the previous " +
      "ones plus the new one."
    : "";
  draw();
}

/** Draw everything that has been fetched. */
function draw() {
  if (!explanation) return;
  const { layer, head } = selected;
  byId("layer").value = layer;
  byId("head").value = head;
  const maskAt = (of) => maskOf(card.config, of);
  const colours = themeColours();
  if (byId("heads-layer").textContent !== `${layer}`) {
    byId("heads-layer").textContent = layer;
    layerHeads.setHeads([layer], range(card.config.n_head), true);
  }
  for (const heads of byId("overview-details").open ? [layerHeads, overview] : [layerHeads]) {
    heads.select(layer, head);
    heads.draw(explanation, maskAt, palette, colours);
  }
  // The previous head stays, dimmed, until the weights arrive.
  if (!explanation.weights(layer, head)) return;
  shownSelection = selected;
  view.show(explanation, layer, head, maskAt(layer), palette);
  showAlignment(explanation, explanation.alignment(layer, head));
  showFormula(card, layer, head, explanation.n);
}
