// A drawing of a model from top to bottom. Colours are classes of model.css, so it is drawn once
// for all themes.

import { innerWidth, isGated, stepsOf } from "./anatomy.js";
import { makeSvg } from "../common/dom.js";
import { formatCount } from "../common/format.js";

const WIDTH = 360;
const GAP = 16; // between steps; the length of an arrow
const INSET = 20; // of a residual's branches, for the line around them
const FRAME = 10; // padding of a repetition's frame
const PAD = 8;
const TITLE = 17; // line heights
const NOTE = 15;
const LETTER = 6.2; // approximate width of a letter in a note
const TITLE_LETTER = 7.6;
const MOST_SQUARE = 14;
const BETWEEN = 0.4; // space between groups of heads, in widths of a head

/** Return the drawing as an SVG element, named by the elements with the ids `labelledBy`. */
export function drawArchitecture(config, labelledBy) {
  const drawing = new Drawing(config);
  const height = drawing.place(stepsOf(config), 0, WIDTH, 1) + 1;
  const attributes = {
    viewBox: `0 0 ${WIDTH} ${height}`,
    role: "img",
    "aria-labelledby": labelledBy,
  };
  return makeSvg("svg", attributes, ...drawing.elements);
}

class Drawing {
  elements = [];
  #config;

  constructor(config) {
    this.#config = config;
  }

  /**
   * Draw steps from y downwards, between x and x + width, with arrows between them. Return the end
   * of the last.
   */
  place(steps, x, width, y) {
    for (const [index, step] of steps.entries()) {
      if (index) y = this.#arrow(x + width / 2, y, y + GAP);
      y = this.#one(step, x, width, y);
    }
    return y;
  }

  #one(step, x, width, y) {
    if (step.branches) return this.#residual(step.branches, x, width, y);
    if (step.times) return this.#repetition(step, x, width, y);
    return this.#box(step, x, width, y);
  }

  #repetition({ times, steps }, x, width, y) {
    const top = y;
    this.#text(
      `× ${formatCount(times)} ${times === 1 ? "layer" : "layers"}`,
      x + width - PAD,
      y + TITLE,
      "caption",
    );
    y = this.#line(x + width / 2, y, y + GAP + FRAME);
    y = this.place(steps, x + FRAME, width - 2 * FRAME, y);
    y = this.#line(x + width / 2, y, y + FRAME);
    const frame = { class: "frame", x: x + 0.5, y: top, width: width - 1, height: y - top, rx: 8 };
    this.elements.unshift(makeSvg("rect", frame)); // behind everything else
    return y;
  }

  /** Draw branches, and a line around them that adds their input to their output. */
  #residual(branches, x, width, y) {
    const [middle, top, left] = [x + width / 2, y, x + PAD];
    const space = (width - 2 * INSET - PAD * (branches.length - 1)) / branches.length;
    y = this.#line(middle, y, y + PAD);
    const starts = branches.map((_, index) => x + INSET + index * (space + PAD));
    if (starts.length > 1)
      this.#path(`M${starts[0] + space / 2} ${y}H${starts.at(-1) + space / 2}`);
    const ends = branches.map((steps, index) => {
      const begin = this.#arrow(starts[index] + space / 2, y, y + GAP - 4);
      return this.place(steps, starts[index], space, begin);
    });
    y = Math.max(...ends) + PAD;
    for (const [index, end] of ends.entries()) this.#line(starts[index] + space / 2, end, y);
    if (starts.length > 1)
      this.#path(`M${starts[0] + space / 2} ${y}H${starts.at(-1) + space / 2}`);
    y = this.#line(middle, y, y + 4);
    this.#path(`M${middle} ${top + 4}H${left}V${y + 8}H${middle - 14}`);
    this.#triangle(middle - 8, y + 8, "right");
    return this.#plus(middle, y + 8) + 8;
  }

  #box({ kind, title, notes }, x, width, y) {
    const lines = notes.flatMap((note) => wrap(note, (width - 2 * PAD) / LETTER));
    const picture =
      kind === "attention" ? this.#heads : kind === "feed-forward" ? this.#widths : () => 0;
    const box = makeSvg("rect", { class: `box ${kind}`, x: x + 0.5, y, width: width - 1, rx: 6 });
    this.elements.push(box);
    let end = y;
    for (const line of wrap(title, (width - 2 * PAD) / TITLE_LETTER)) {
      end = this.#text(line, x + width / 2, end + TITLE, "title");
    }
    end += 6;
    end += picture.call(this, x + PAD, width - 2 * PAD, end);
    for (const line of lines) end = this.#text(line, x + width / 2, end - 4 + NOTE, "note") + 4;
    box.setAttribute("height", end + (lines.length ? 3 : 2) - y);
    return end + (lines.length ? 3 : 2);
  }

  /** Draw query heads above the key-value heads that they share. Return the height. */
  #heads(x, width, y) {
    const { n_head: heads, n_kv_head: shared } = this.#config;
    const each = Math.min(MOST_SQUARE + 2, width / (heads + BETWEEN * (shared - 1)));
    const between = each * BETWEEN;
    const square = each * 0.85;
    const start = x + (width - heads * each - between * (shared - 1)) / 2;
    for (let head = 0; head < heads; head += 1) {
      const left = start + head * each + between * Math.floor((head * shared) / heads);
      this.#rect("query", left, y, square, MOST_SQUARE);
    }
    const group = (heads / shared) * each;
    for (let head = 0; head < shared; head += 1) {
      this.#rect(
        "key-value",
        start + head * (group + between),
        y + MOST_SQUARE + 3,
        group - each + square,
        6,
      );
    }
    return MOST_SQUARE + 3 + 6 + 3;
  }

  /** Draw bars as wide as the input, the inner layer and the output. Return the height. */
  #widths(x, width, y) {
    const [model, inner] = [this.#config.d_model, innerWidth(this.#config)];
    const bars = ["outer", ...(isGated(this.#config) ? ["inner", "inner"] : ["inner"]), "outer"];
    for (const [index, name] of bars.entries()) {
      const length = (width * 0.8 * (name === "inner" ? inner : model)) / Math.max(model, inner);
      this.#rect(name, x + (width - length) / 2, y + index * 7, length, 4);
    }
    return bars.length * 7;
  }

  #rect(name, x, y, width, height) {
    this.elements.push(
      makeSvg("rect", { class: name, x, y, width, height, rx: Math.min(1.5, width / 4) }),
    );
  }

  #text(content, x, y, name) {
    this.elements.push(makeSvg("text", { class: name, x, y }, content));
    return y;
  }

  #path(d, name = "line") {
    this.elements.push(makeSvg("path", { class: name, d }));
  }

  #line(x, from, to) {
    this.#path(`M${x} ${from}V${to}`);
    return to;
  }

  #arrow(x, from, to) {
    this.#line(x, from, to - 4);
    this.#triangle(x, to, "down");
    return to;
  }

  #triangle(x, y, way) {
    this.#path(way === "down" ? `M${x} ${y}l-4 -6h8Z` : `M${x} ${y}l-6 -4v8Z`, "tip");
  }

  #plus(x, y) {
    this.elements.push(makeSvg("circle", { class: "plus", cx: x, cy: y, r: 8 }));
    this.#path(`M${x - 4} ${y}h8M${x} ${y - 4}v8`);
    return y;
  }
}

/** Split a text into lines of at most `most` letters. */
function wrap(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + 1 + word.length > most) lines.push("");
    lines[lines.length - 1] += `${lines.at(-1) ? " " : ""}${word}`;
  }
  return lines;
}
