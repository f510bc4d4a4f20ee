// The attention explorer: a text, one head at a time, all heads small, and what would come next.

import { Palette, themeColours } from "../shared/colours.js";
import { byId, make } from "../shared/dom.js";
import { complete, read } from "./explanations.js";
import { showFormula } from "./formula.js";
import { HeadView } from "./head_view.js";
import { Heads } from "./heads.js";
import { showNextTokens } from "./next_tokens.js";
import { windowOf } from "./weights.js";

const MOST_OVERVIEWED = 2 ** 22; // weights of all heads, which come in four answers

let card;
let view;
let ofLayer;
let overview;
let palette;
let wanted = null; // {text, ids}: what is to be shown; ids, where the text was put together from tokens
let shownWish = null; // what was wanted of what is shown
let reading = null; // what is shown
let place = { layer: 0, head: 0 }; // what is chosen
let shownPlace = place; // what is drawn
let refused = null; // what a new key may show
let job = null; // only the last question is answered

export function start(modelCard) {
  card = modelCard;
  if (!card.has_attention) return sayMissing();
  view = new HeadView();
  ofLayer = new Heads(byId("heads"), "head-of-layer", card.config.n_head > 12 ? 60 : 92, choose);
  overview = new Heads(byId("overview"), "head-of-all", card.config.n_head > 12 ? 26 : 44, choose);
  overview.lay(range(card.config.n_layer), range(card.config.n_head), false);
  fillSelect("layer", card.config.n_layer);
  fillSelect("head", card.config.n_head);
  colour();
  byId("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    explain({ text: byId("explain-text").value });
  });
  byId("explain-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey))
      byId("explain-form").requestSubmit();
  });
  byId("lifted").addEventListener("change", colour);
  byId("overview-details").addEventListener("toggle", load);
  window.addEventListener("kvasir:theme", colour);
  window.addEventListener("kvasir:new-key", askAgain);
}

/** The view has come: the text that stands in it is explained at once. */
export function show() {
  if (card.has_attention && !wanted) explain({ text: byId("explain-text").value });
}

function sayMissing() {
  byId("explain-form").hidden = true;
  byId("attention-missing").hidden = false;
  byId("attention-missing").textContent =
    card.device === "cpu"
      ? "This model directory has no attention.onnx, which gives the weights; export the model again with kvasir export."
      : "Attention can be looked at on the CPU only; export the model with kvasir export --device cpu, and serve that.";
}

const range = (count) => Array.from({ length: count }, (_, i) => i);

function fillSelect(id, count) {
  byId(id).replaceChildren(...range(count).map((i) => make("option", { value: i }, `${i}`)));
  byId(id).addEventListener("change", () =>
    choose(Number(byId("layer").value), Number(byId("head").value)),
  );
}

function colour() {
  palette = new Palette(byId("lifted").checked);
  draw();
}

function explain(wish) {
  wanted = wish;
  load();
}

function askAgain() {
  if (!refused) return;
  ({ wanted, place } = refused);
  load();
}

function append(token) {
  byId("explain-text").value = reading.text + token.text;
  explain({ text: byId("explain-text").value, ids: [...reading.ids, token.token_id] });
}

function choose(layer, head) {
  place = { layer, head };
  draw();
  load();
}

/** Get what is wanted and has not come yet: the text, the chosen head, the others of its layer, and of all layers. */
async function load() {
  job?.abort();
  const mine = new AbortController();
  job = mine;
  refused = null;
  byId("explain-error").hidden = true;
  byId("explained").setAttribute("aria-busy", "true");
  try {
    await fetchLacking({ signal: mine.signal, onwait: sayWaiting, limits: card.explain_limits });
  } catch (error) {
    if (!mine.signal.aborted) fail(error);
  }
  if (job === mine) byId("explained").removeAttribute("aria-busy");
}

async function fetchLacking(options) {
  if (reading?.text !== wanted.text) {
    byId("explain-status").textContent = "Reading…";
    reading = await read(wanted.text, place.layer, place.head, options);
    showText();
  }
  const { layer, head } = place;
  const { n_layer: nLayer, n_head: nHead } = card.config;
  const chosenFirst = [head, ...range(nHead).filter((other) => other !== head)];
  await complete(reading, [layer], chosenFirst, options, draw);
  const isSmall = nLayer * nHead * reading.n ** 2 <= MOST_OVERVIEWED;
  if (byId("overview-details").open && isSmall)
    await complete(reading, range(nLayer), range(nHead), options, draw);
  byId("overview-note").textContent = isSmall
    ? "A row for each layer, from the first at the top."
    : "A row for each layer. The text is too long to get all at once: a layer is drawn when you have been there, " +
      "as long as the page keeps its weights.";
}

/** What was there before stays, and is what is chosen again. */
function fail(error) {
  if (error.status === 401) refused = { wanted, place };
  wanted = shownWish;
  place = shownPlace;
  showStatus();
  draw();
  byId("explain-error").hidden = false;
  byId("explain-error").textContent = error.message;
}

function sayWaiting(error) {
  byId("explain-status").textContent = `Waiting: ${error.message}`;
}

function showStatus() {
  const { max_tokens: most } = card.explain_limits;
  byId("explain-status").textContent = reading ? `${reading.n} tokens, of at most ${most}` : "";
}

/** What depends on the text alone. */
function showText() {
  shownWish = wanted;
  byId("explained").hidden = false;
  showStatus();
  showNextTokens(byId("next-tokens"), byId("next-rest"), reading.nextTokens, append);
  const { ids } = wanted;
  const cut = ids && (ids.length !== reading.n || ids.some((id, i) => id !== reading.ids[i]));
  byId("next-note").hidden = !cut;
  byId("next-note").textContent = cut
    ? "With this token, the tokenizer cuts the text otherwise: what you see is not the token after the ones before."
    : "";
  draw();
}

/** Draw all that has come. */
function draw() {
  if (!reading) return;
  const { layer, head } = place;
  byId("layer").value = layer;
  byId("head").value = head;
  const windows = (of) => windowOf(card.config, of);
  const colours = themeColours();
  if (byId("heads-layer").textContent !== `${layer}`) {
    byId("heads-layer").textContent = layer;
    ofLayer.lay([layer], range(card.config.n_head), true);
  }
  for (const heads of byId("overview-details").open ? [ofLayer, overview] : [ofLayer]) {
    heads.choose(layer, head);
    heads.draw(reading, windows, palette, colours);
  }
  if (!reading.weights(layer, head)) return; // what was there stays, dimmed, until it comes
  shownPlace = place;
  view.show(reading, layer, head, windows(layer), palette);
  showFormula(card, layer, head, reading.n);
}
