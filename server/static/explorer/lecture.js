// The pinned row of one head, computed step by step from its queries, keys and values.

import { byId, clone, present } from "../common/dom.js";
import { quoted, visible } from "../common/token_text.js";
import { formatWeight, isVisible } from "./weights.js";

const STEP_MILLISECONDS = 1600;
const LAST_STEP = 4;

let step = 0;
let timer = null; // while the steps play
let shown = null; // the numbers of the row, and the table's lines

/** Prepare the buttons. */
export function startLecture() {
  [...byId("lecture-steps").children].forEach((button, i) =>
    button.addEventListener("click", () => choose(i)),
  );
  byId("lecture-play").addEventListener("click", () => (timer === null ? play() : stop()));
}

/** Show a row, at the step that was chosen last; values: head_values of a response, or undefined. */
export function showLecture(values, row, { tokens, weights, mask, config, isRecurrent }) {
  byId("lecture").hidden = !values;
  byId("lecture-missing").hidden = Boolean(values) || isRecurrent;
  if (!values) return;
  const scaled = values.scores[row].map((score, key) => {
    const cap = config.attention_softcap;
    const product = score * values.scale;
    const capped = cap === null ? product : cap * Math.tanh(product / cap);
    return capped + (values.bias?.[row][key] ?? 0);
  });
  const masked = scaled.map((score, key) => (isVisible(row, key, mask) ? score : null));
  const columns = [values.scores[row], scaled, masked, weights, weights];
  const products = values.values.map((value, key) => value.map((number) => number * weights[key]));
  const output = values.queries[row].map((_, i) =>
    products.reduce((sum, product) => sum + product[i], 0),
  );
  const lines = tokens.map((token) => clone("lecture-line", { token: visible(token) }));
  const total = clone("lecture-line", { token: "Z" }, { class: "total" });
  shown = { columns, products, output, lines, total };
  present(byId("lecture-text"), factsOf(values, row, columns, tokens));
  byId("lecture-body").replaceChildren(total, ...lines);
  draw();
}

/** Return what the texts of the steps say, of the key with the largest weight. */
function factsOf({ queries, keys, scale, sink }, row, [scores, scaled, masked, weights], tokens) {
  const most = weights.indexOf(Math.max(...weights));
  const products = queries[row].map((number, i) => `${short(number)} · ${short(keys[most][i])}`);
  const seen = masked.filter((score) => score !== null);
  const summed = sink === null ? seen : [...seen, sink];
  const highest = Math.max(...summed);
  return {
    query: quoted(tokens[row]),
    key: quoted(tokens[most]),
    products: products.slice(0, 3).join(" + "),
    width: products.length,
    score: short(scores[most]),
    scale: short(scale),
    scaled: short(scaled[most]),
    n: masked.length,
    unseen: masked.length - seen.length,
    sink: sink !== null,
    highest: short(highest),
    sum: short(summed.reduce((total, score) => total + Math.exp(score - highest), 0)),
    weight: formatWeight(weights[most]),
  };
}

const short = (number) => number.toPrecision(3).replace("-", "−");

function choose(to) {
  stop();
  step = to;
  draw();
}

function play() {
  step = step === LAST_STEP ? 0 : step;
  byId("lecture-play").textContent = "Stop";
  timer = setInterval(() => {
    step += 1;
    draw();
    if (step === LAST_STEP) stop();
  }, STEP_MILLISECONDS);
  draw();
}

function stop() {
  clearInterval(timer);
  timer = null;
  byId("lecture-play").textContent = "Play";
}

function draw() {
  [...byId("lecture-steps").children].forEach((button, i) =>
    button.setAttribute("aria-pressed", i === step),
  );
  [...byId("lecture-text").children].forEach((text, i) => (text.hidden = i !== step));
  if (!shown) return;
  const { columns, products, output, lines, total } = shown;
  const numbers = columns[step];
  const isLast = step === LAST_STEP;
  const largest = Math.max(1e-9, ...numbers.map(Math.abs)); // of null: 0
  const brightest = Math.max(1e-9, ...output.map(Math.abs), ...products.flat().map(Math.abs));
  lines.forEach((line, key) => {
    const number = numbers[key];
    line.querySelector("[data-part=number]").textContent =
      number === null ? "−∞" : step < 3 ? short(number) : formatWeight(number);
    fill(line, number ?? 0, largest, isLast ? products[key] : null, brightest);
  });
  total.hidden = !isLast;
  fill(total, 1, 1, output, brightest);
}

/** Draw a number as a bar from the middle, or numbers as cells of a strip. */
function fill(line, number, largest, strip, brightest) {
  const bar = line.querySelector("[data-part=bar]");
  const share = (50 * Math.abs(number)) / largest;
  bar.style.left = strip ? "0" : `${number < 0 ? 50 - share : 50}%`;
  bar.style.width = strip ? "100%" : `${share}%`;
  const stops = strip?.map((part, i) => {
    const colour = part < 0 ? "var(--quiet)" : "var(--accent)";
    const percent = (100 * Math.abs(part)) / brightest;
    const [from, to] = [i, i + 1].map((end) => `${(100 * end) / strip.length}%`);
    return `color-mix(in srgb, ${colour} ${percent}%, var(--sunken)) ${from} ${to}`;
  });
  bar.style.background = stops ? `linear-gradient(to right, ${stops.join(", ")})` : "";
}
