// The attention explorer: a text, one head in detail, all heads as thumbnails, and the next token.

import { showAlignment } from "./alignment.js";
import { Palette, themeColours } from "../common/colours.js";
import { byId, make, present } from "../common/dom.js";
import { explainRow, explainText, fetchMissing } from "./explanations.js";
import { showFormula } from "./formula.js";
import { HeadView } from "./head_view.js";
import { describe, Heads } from "./heads.js";
import { showRowAnswers, showSwitches } from "./lab.js";
import { showLecture, startLecture } from "./lecture.js";
import { loading } from "../common/loading.js";
import { attends, headsOf, memoryOf } from "../model/anatomy.js";
import { showNextTokens } from "./next_tokens.js";
import { maskOf } from "./weights.js";

const CODE = "with open(path) as file:\n    return json.load(";
const MAX_OVERVIEW_WEIGHTS = 2 ** 22; // of all heads together: four responses

let card;
let view;
let layerHeads;
let overview;
let run;
let palette;
// What is to be shown. input: { text, ids }, ids only if tokens were appended one by one; without:
// the heads that are switched off, ["1.0", …]; focused: select the head that is most focused at the
// pinned row.
let asked = { input: null, selected: { layer: 0, head: 0 }, without: [], focused: false };
let shown = asked; // the last of what was asked that has arrived
let explanation = null; // the shown explanation
let answers = null; // { key, response } about the pinned row
let rejected = null; // what to ask again with a new key, after a 401

export function start(modelCard) {
  card = modelCard;
  const { n_layer: nLayer, pooling, encoder } = card.config;
  const layers = range(nLayer).filter((layer) => headsAt(layer).length);
  const headless = !layers.length;
  card = { ...card, has_attention: card.has_attention && !headless };
  if (!card.has_attention) return showUnavailable(headless);
  const nHead = Math.max(...layers.map((layer) => headsAt(layer).length));
  asked.selected.layer = layers[0];
  view = new HeadView(load);
  run = loading(byId("explained"), byId("explain-error"));
  startLecture();
  layerHeads = new Heads(byId("heads"), "head-of-layer", nHead > 12 ? 60 : 92, select);
  overview = new Heads(byId("overview"), "head-of-all", nHead > 12 ? 26 : 44, select);
  overview.setHeads(layers, headsAt);
  const example = card.source.name === "stdlib" ? CODE : card.examples[0]; // the example model's
  if (example) byId("explain-text").value = example;
  setOptions("layer", layers);
  for (const id of ["layer", "head"])
    byId(id).addEventListener("change", () => {
      const layer = Number(byId("layer").value);
      select(layer, Math.min(Number(byId("head").value), headsAt(layer).length - 1));
    });
  byId("reading").addEventListener("change", draw);
  byId("next-card").hidden = pooling !== null || encoder !== null; // no token may be appended
  hideLab(pooling !== null);
  byId("focused").addEventListener("click", () => ask({ focused: true }));
  colour();
  byId("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(written());
  });
  byId("emphasise").addEventListener("change", colour);
  byId("overview-details").addEventListener("toggle", load);
  window.addEventListener("kvasir:theme", colour);
  window.addEventListener("kvasir:new-key", retryWithKey);
}

/** Show what a link says: prompt, token (the row to pin), layer, head, without, focused. */
export function open(params) {
  if (!card.has_attention) return;
  const within = (name, count) => Math.min(count - 1, Math.max(0, parseInt(params.get(name)) || 0));
  const { n_layer: nLayer, pooling } = card.config;
  if (params.has("prompt")) byId("explain-text").value = params.get("prompt");
  const without = (params.get("without") ?? "").split(",").filter((name) => {
    const [layer, head] = name.split(".").map(Number);
    return /^\d+\.\d+$/.test(name) && layer < nLayer && head < headsAt(layer).length;
  });
  const { max_tokens: most } = card.explain_limits;
  view.wanted = { row: params.has("token") ? within("token", most) : null };
  const named = within("layer", nLayer);
  const layer = headsAt(named).length ? named : asked.selected.layer;
  const selected = { layer, head: within("head", headsAt(layer).length) };
  ask({ ...written(), selected, without, focused: params.has("focused") && pooling === null });
}

/** Return the link to what is shown. */
export function state() {
  if (!explanation) return null;
  const { selected, without } = asked;
  const pinned = view.pinned === view.usual ? {} : { token: view.pinned };
  const off = without.length ? { without } : {};
  return new URLSearchParams({ prompt: explanation.text, ...selected, ...pinned, ...off });
}

/** Explain the text in the input when the view is first shown, at its most focused head. */
export function show() {
  if (card.has_attention && !asked.input)
    ask({ ...written(), focused: card.config.pooling === null });
}

function showUnavailable(headless) {
  const isOff = card.explain_limits === null;
  document.querySelector("header a[href='#attention']").hidden = isOff;
  byId("explain-form").hidden = true;
  byId("attention-missing").hidden = false;
  present(byId("attention-missing"), { off: isOff, device: card.device, headless });
}

function hideLab(isHidden) {
  byId("lab").hidden = byId("focused").hidden = isHidden;
}

/** Return the heads of a layer. */
const headsAt = (layer) => range(headsOf(card.config, layer));

const isRecurrent = (layer) => !attends(card.config, layer);

const setOptions = (id, values) =>
  byId(id).replaceChildren(...values.map((i) => make("option", { value: i }, `${i}`)));

const range = (count) => Array.from({ length: count }, (_, i) => i);

const written = () => ({ input: { text: byId("explain-text").value } });

function colour() {
  palette = new Palette(byId("emphasise").checked);
  draw();
}

function ask(changes) {
  asked = { ...asked, ...changes };
  load();
}

function select(layer, head) {
  ask({ selected: { layer, head }, focused: false });
  draw();
}

function append(token) {
  byId("explain-text").value = explanation.text + token.text;
  ask({ input: { ...written().input, ids: [...explanation.ids, token.token_id] } });
}

function retryWithKey() {
  if (!rejected) return;
  view.wanted = rejected.wanted;
  ask(rejected.asked);
}

/**
 * Fetch what is missing, in this order: the text, the selected head, the rest of its layer, all
 * layers.
 */
function load() {
  rejected = null;
  const { explain_limits: limits, model, config } = card;
  run((signal) => loadMissing({ signal, onwait: showWaiting, limits, model, config }), fail);
}

async function loadMissing(options) {
  const { input, without } = asked;
  if (explanation?.text !== input.text || `${explanation.without}` !== `${without}`) {
    const { layer, head } = asked.selected;
    byId("explain-status").textContent = "Explaining…";
    explanation = await explainText(input.text, without, layer, head, options);
    showText();
  }
  const fetchSelected = async () => {
    await fetchMissing(explanation, [asked.selected.layer], [asked.selected.head], options, draw);
    draw(); // pins the row that a link names
    return await askRow(options);
  };
  const { entropies } = await fetchSelected();
  if (asked.focused && entropies?.flat().length) {
    const least = Math.min(...entropies.flat());
    const layer = entropies.findIndex((ofLayer) => ofLayer.includes(least));
    asked.selected = { layer, head: entropies[layer].indexOf(least) };
    await fetchSelected();
  }
  asked.focused = false;
  const { layer, head } = asked.selected;
  const chosenFirst = [head, ...headsAt(layer).filter((other) => other !== head)];
  await fetchMissing(explanation, [layer], chosenFirst, options, draw);
  const layers = range(card.config.n_layer).filter((one) => headsAt(one).length);
  const nHeads = layers.reduce((sum, one) => sum + headsAt(one).length, 0);
  const isSmall = nHeads * explanation.perHead <= MAX_OVERVIEW_WEIGHTS;
  if (byId("overview-details").open && isSmall)
    for (const same of Object.values(Object.groupBy(layers, isRecurrent)))
      await fetchMissing(explanation, same, headsAt(same[0]), options, draw);
  byId("overview-note").hidden = isSmall;
}

/** Return the answers about the pinned row of the selected head, and show them. */
async function askRow(options) {
  const [key, ofHead] = [rowKey(), rowKey("")];
  if (answers?.key !== key) {
    const values = answers?.ofHead === ofHead ? answers.response.head_values : undefined;
    const hasValues = Boolean(values) || isRecurrent(asked.selected.layer); // which has none
    const row = { ...asked.selected, row: view.pinned, hasValues };
    const response = await explainRow(explanation, row, options).catch(withoutLab);
    answers = { key, ofHead, response: { head_values: values, ...response } };
    hideLab(!response.entropies);
  }
  showRow();
  return answers.response;
}

/** Do without the lab where attention.onnx is of an older Kvasir, which a 400 tells. */
function withoutLab(error) {
  if (error.status !== 400) throw error;
  byId("lecture-missing").textContent = error.message;
  return { lens: [], entropies: null };
}

const rowKey = (row = view.pinned) =>
  JSON.stringify([explanation.text, asked.without, asked.selected, row]);

function showRow() {
  const { layer, head } = asked.selected;
  const weights = explanation.weights(layer, head);
  if (!weights || answers?.key !== rowKey()) return;
  const [{ response }, row, { n, tokens }] = [answers, view.pinned, explanation];
  const own = Array.from(weights.subarray(row * n, (row + 1) * n));
  const mask = maskOf(card.config, layer);
  if (card.config.pooling === null) showRowAnswers(response, tokens[row]);
  const { config } = card;
  const facts = { tokens, weights: own, mask, config, isRecurrent: isRecurrent(layer) };
  showLecture(response.head_values, row, facts);
  window.dispatchEvent(new Event("kvasir:state"));
}

/** Return to what was shown before. */
function fail(error) {
  if (error.status === 401) rejected = { asked, wanted: view.wanted };
  asked = { ...shown, focused: false };
  view.wanted = null;
  showStatus();
  draw();
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
  const { input, without } = asked;
  shown = { ...shown, input, without };
  byId("explained").hidden = false;
  showStatus();
  showNextTokens(explanation.nextTokens, append);
  byId("next-note").hidden = !input.ids || `${input.ids}` === `${explanation.ids}`;
  draw();
}

/** Draw everything that has been fetched. */
function draw() {
  if (!explanation) return;
  const { layer, head } = asked.selected;
  explanation.reads = byId("reading").value === "weights";
  byId("reading-choice").hidden = !isRecurrent(layer);
  if (byId("head").children.length !== headsAt(layer).length) setOptions("head", headsAt(layer));
  byId("layer").value = layer;
  byId("head").value = head;
  const maskAt = (of) => maskOf(card.config, of);
  const colours = themeColours();
  if (byId("heads-layer").textContent !== `${layer}`) {
    byId("heads-layer").textContent = layer;
    layerHeads.setHeads([layer], headsAt);
  }
  for (const heads of byId("overview-details").open ? [layerHeads, overview] : [layerHeads]) {
    heads.select(layer, head);
    heads.draw(explanation, maskAt, palette, colours);
  }
  showSwitches(asked.without, asked.selected, (without) => {
    ask({ without });
    byId("switch").focus(); // the other button disappears
    draw();
  });
  const behaviour = explanation.behaviours.get(`${layer}.${head}`);
  const measured = behaviour && describe(behaviour);
  const { mixer, rows, columns } = memoryOf(card.config);
  const kept = `${mixer}: the head keeps a matrix of ${rows} × ${columns} numbers, and no tokens.`;
  byId("behaviour").textContent = measured ? `In this text: ${measured}.` : "";
  if (isRecurrent(layer)) byId("behaviour").textContent = kept;
  const alignment = explanation.alignment(layer, head);
  const attendsToSource = isRecurrent(layer) && alignment !== undefined;
  byId("explained").classList.toggle("source-only", attendsToSource);
  if (attendsToSource) {
    byId("behaviour").textContent = `${mixer}: the head attends to the source alone.`;
    shown = { ...shown, selected: asked.selected };
    showAlignment(explanation, alignment);
  }
  // The previous head stays, dimmed, until the weights arrive.
  if (!explanation.weights(layer, head)) return;
  shown = { ...shown, selected: asked.selected };
  view.show(explanation, layer, head, maskAt(layer), palette, isRecurrent(layer));
  showAlignment(explanation, alignment);
  showFormula(card, layer, head, explanation.n);
  showRow();
}
