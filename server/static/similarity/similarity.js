// The similarity view: texts × texts as a heat map of cosines, and the tokens of a pair that match.

import { Palette } from "../common/colours.js";
import { byId, make } from "../common/dom.js";
import { visible } from "../common/token_text.js";
import { bestMatches, cosine, tokensOf, vectorsOf } from "./vectors.js";

const MOST_TEXTS = 24;

let card;
let texts = [];
let vectors = [];
let pair = [0, 1]; // the selected row and column
let sides = []; // the tokens of its texts, each with its match in the other text
let job = null; // aborts the current load: only the last one counts

export function start(modelCard) {
  card = modelCard;
  byId("similarity-form").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  byId("similarity-texts").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey))
      byId("similarity-form").requestSubmit();
  });
  byId("similarity-map").addEventListener("keydown", move);
  window.addEventListener("kvasir:theme", draw);
  window.addEventListener("kvasir:new-key", compare);
}

export function show() {
  if (!vectors.length) compare();
}

async function compare() {
  const lines = byId("similarity-texts").value.split("\n");
  const given = lines.map((line) => line.trim()).filter(Boolean);
  await load(async (signal) => {
    if (given.length < 2 || given.length > MOST_TEXTS)
      throw new Error(`Give 2 to ${MOST_TEXTS} texts, one on each line; there are ${given.length}.`);
    vectors = await vectorsOf(card.model, given, signal);
    [texts, pair, sides] = [given, [0, 1], []];
    draw();
    await match(signal);
  });
}

function select(row, column) {
  pair = [row, column];
  sides = [];
  draw();
  byId("similarity-map").rows[row + 1].cells[column + 1].firstElementChild.focus();
  load(match);
}

async function match(signal) {
  const [one, other] = await tokensOf(card.model, pair.map((index) => texts[index]), signal);
  sides = [
    { tokens: one, others: other, matches: bestMatches(one, other) },
    { tokens: other, others: one, matches: bestMatches(other, one) },
  ];
  draw();
}

/** Run work that fetches, and show its error. */
async function load(work) {
  job?.abort();
  const controller = new AbortController();
  job = controller;
  byId("similarity-error").hidden = true;
  byId("similarities").setAttribute("aria-busy", "true");
  try {
    await work(controller.signal);
  } catch (error) {
    if (controller.signal.aborted) return;
    byId("similarity-error").hidden = false;
    byId("similarity-error").textContent = error.message;
  }
  if (job === controller) byId("similarities").removeAttribute("aria-busy");
}

function draw() {
  if (!vectors.length) return;
  const palette = new Palette(false);
  byId("similarities").hidden = false;
  const heads = texts.map((text, i) => make("th", { scope: "col", title: text }, `${i + 1}`));
  const rows = texts.map((text, row) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, `${row + 1} ${text}`),
      ...texts.map((_, column) => cell(row, column, palette)),
    ),
  );
  const corner = make("td");
  byId("similarity-map").replaceChildren(make("tr", {}, corner, ...heads), ...rows);
  drawSides(palette);
}

function cell(row, column, palette) {
  const value = cosine(vectors[row], vectors[column]);
  const isSelected = row === pair[0] && column === pair[1];
  const button = make(
    "button",
    {
      type: "button",
      "aria-pressed": `${isSelected}`,
      "aria-label": `texts ${row + 1} and ${column + 1}: ${value.toFixed(2)}`,
      tabindex: isSelected ? 0 : -1,
      onclick: () => select(row, column),
    },
    value.toFixed(2),
  );
  shade(button, value, palette);
  return make("td", {}, button);
}

/** Move between cells by the arrow keys. The Tab key stops once. */
function move(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!(event.key in step)) return;
  const [row, column] = pair.map((index, axis) => index + step[event.key][axis]);
  event.preventDefault();
  if (texts[row] && texts[column]) select(row, column);
}

function drawSides(palette) {
  const [row, column] = pair;
  byId("matches-title").textContent = `Tokens of texts ${row + 1} and ${column + 1}`;
  const lists = sides.map(({ tokens, others, matches }) =>
    make(
      "p",
      { class: "match-tokens" },
      ...tokens.map(({ name }, i) => {
        const best = others[matches[i].index].name;
        const title = `${visible(name)} matches ${visible(best)}: ${matches[i].cosine.toFixed(2)}`;
        const token = make("span", { class: "token", title }, visible(name));
        shade(token, matches[i].cosine, palette);
        return token;
      }),
    ),
  );
  byId("matches").replaceChildren(...lists);
  byId("best-matches").replaceChildren(...bestPairs().map(pairRow));
}

/** Return the tokens that are each other's best match, the most similar first. */
function bestPairs() {
  if (!sides.length) return [];
  const [one, other] = sides;
  return one.matches
    .map((found, i) => ({ ...found, name: one.tokens[i].name, i }))
    .filter(({ index, i }) => other.matches[index].index === i)
    .map((found) => ({ ...found, match: other.tokens[found.index].name }))
    .sort((a, b) => b.cosine - a.cosine);
}

function pairRow({ name, match: found, cosine: value }) {
  const names = [name, found].map((one) => make("td", { class: "token-name" }, visible(one)));
  return make("tr", {}, ...names, make("td", { class: "number" }, value.toFixed(4)));
}

/** Colour an element by a cosine; those below 0 look like 0. */
function shade(element, value, palette) {
  [element.style.background, element.style.color] = palette.pair(Math.max(0, value));
}
