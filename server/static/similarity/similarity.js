// The similarity view: texts × texts as a heat map of cosines, and the tokens of a pair that match.

import { Palette } from "../common/colours.js";
import { byId, clone, make } from "../common/dom.js";
import { loading } from "../common/loading.js";
import { visible } from "../common/token_text.js";
import { bestMatches, cosine, tokensOf, vectorsOf } from "./vectors.js";

const MOST_TEXTS = 24;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

let card;
let run;
let texts = [];
let vectors = [];
let pair = [0, 1]; // the selected row and column
let sides = []; // the tokens of its texts, each with its match in the other text

export function start(modelCard) {
  card = modelCard;
  run = loading(byId("similarities"), byId("similarity-error"));
  byId("similarity-form").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  byId("similarity-map").addEventListener("keydown", move);
  window.addEventListener("kvasir:theme", draw);
  window.addEventListener("kvasir:new-key", compare);
}

export function show() {
  if (!vectors.length) compare();
}

function compare() {
  const lines = byId("similarity-texts").value.split("\n");
  const given = lines.map((line) => line.trim()).filter(Boolean);
  run(async (signal) => {
    if (given.length < 2 || given.length > MOST_TEXTS)
      throw new Error(`Give 2 to ${MOST_TEXTS} texts, one on a line; there are ${given.length}.`);
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
  run(match);
}

async function match(signal) {
  const both = pair.map((index) => texts[index]);
  const [one, other] = await tokensOf(card.model, both, signal);
  sides = [bestMatches(one, other), bestMatches(other, one)];
  draw();
}

function draw() {
  if (!vectors.length) return;
  const palette = new Palette(false);
  byId("similarities").hidden = false;
  const heads = texts.map((text, i) => make("th", { scope: "col", title: text }, `${i + 1}`));
  const rows = texts.map((text, row) => {
    const cells = texts.map((_, column) => cell(row, column, palette));
    return make("tr", {}, make("th", { scope: "row" }, `${row + 1} ${text}`), ...cells);
  });
  byId("similarity-map").replaceChildren(make("tr", {}, make("td"), ...heads), ...rows);
  drawSides(palette);
}

function cell(row, column, palette) {
  const value = cosine(vectors[row], vectors[column]);
  const isSelected = row === pair[0] && column === pair[1];
  const button = {
    "aria-pressed": `${isSelected}`,
    "aria-label": `texts ${row + 1} and ${column + 1}: ${value.toFixed(2)}`,
    tabindex: isSelected ? 0 : -1,
    onclick: () => select(row, column),
    style: shade(value, palette),
  };
  return clone("similarity-cell", { button: [button, value.toFixed(2)] });
}

/** Move between cells by the arrow keys. The Tab key stops once. */
function move(event) {
  if (!(event.key in MOVES)) return;
  const [row, column] = pair.map((index, axis) => index + MOVES[event.key][axis]);
  event.preventDefault();
  if (texts[row] && texts[column]) select(row, column);
}

function drawSides(palette) {
  const [row, column] = pair;
  byId("matches-title").textContent = `Tokens of texts ${row + 1} and ${column + 1}`;
  const lists = sides.map((tokens) => {
    const shaded = tokens.map(({ name, match: found, cosine: value }) => {
      const title = `${visible(name)} matches ${visible(found)}: ${value.toFixed(2)}`;
      const style = shade(value, palette);
      return make("span", { class: "token", title, style }, visible(name));
    });
    return make("p", { class: "match-tokens flow" }, ...shaded);
  });
  byId("matches").replaceChildren(...lists);
  byId("best-matches").replaceChildren(...bestPairs().map(pairRow));
}

/** Return the tokens that are each other's best match, the most similar first. */
function bestPairs() {
  if (!sides.length) return [];
  const [one, other] = sides;
  return one.filter(({ index }, i) => other[index].index === i).sort((a, b) => b.cosine - a.cosine);
}

const pairRow = ({ name, match: found, cosine: value }) =>
  clone("best-match", { one: visible(name), other: visible(found), cosine: value.toFixed(4) });

/** Return the colours of a cosine; those below 0 look like 0. */
function shade(value, palette) {
  const [background, color] = palette.pair(Math.max(0, value));
  return { background, color };
}
