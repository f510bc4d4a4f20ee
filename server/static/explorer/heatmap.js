// The heat map of one head: queries from top to bottom, keys from left to right, tokens on both
// axes. The axes stay in view. The canvas has the size of the visible part and is redrawn on
// scrolling.

import { themeColours } from "../common/colours.js";
import { makeSvg } from "../common/dom.js";
import { visible } from "../common/token_text.js";
import { hatching, sharpen, weightImage } from "./weight_image.js";

export const CELL = { least: 2, most: 72, fitted: [12, 72] }; // CSS pixels
const LINE = 12; // least distance between labels
const LABEL = { least: 34, most: 104 };
const MOST_SIDE = 8_000; // of a picture, in its own pixels; browsers have limits
const LONGEST = 14; // characters of a label; the readout shows the whole token

export class HeatMap {
  /**
   * Draws in `scroller`, which contains a sizer as large as the whole map, which contains a canvas.
   */
  constructor(scroller) {
    this.scroller = scroller;
    this.sizer = scroller.firstElementChild;
    this.canvas = this.sizer.firstElementChild;
    this.cell = 0; // size chosen by the user, or 0 to fit
    this.marks = { pinned: 0, point: null };
    this.cursor = null; // the keyboard's cell while the map has the focus
    scroller.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.layOut()).observe(scroller);
  }

  /** Show n × n weights with the palette of the current theme. */
  show({ tokens, weights, mask, palette }) {
    this.labels = tokens.map(label);
    this.n = tokens.length;
    this.colours = themeColours();
    this.image = weightImage(weights, this.n, mask, palette);
    this.layOut();
  }

  /** Mark the pinned row, and a cell { query, key } or null. */
  mark(marks) {
    this.marks = marks;
    this.draw();
  }

  zoom(cell) {
    this.cell = cell;
    this.layOut();
  }

  /**
   * CSS pixels from cell to cell: as chosen, or the size at which the whole map fits, within
   * limits.
   */
  get size() {
    const [least, most] = CELL.fitted;
    const { clientWidth: width } = this.scroller;
    const side = Math.min(width, parseFloat(getComputedStyle(this.scroller).maxHeight));
    const whole = Math.floor((side - this.margin - 1) / this.n);
    return this.cell || Math.min(most, Math.max(least, whole));
  }

  layOut() {
    if (!this.image || !this.scroller.clientWidth) return; // hidden or empty
    const pen = this.canvas.getContext("2d");
    pen.font = this.font;
    const widest = Math.max(...this.labels.map((text) => pen.measureText(text).width));
    this.margin = Math.ceil(Math.min(LABEL.most, Math.max(LABEL.least, widest))) + 10;
    this.sizer.style.width = this.sizer.style.height = `${this.whole}px`;
    this.width = Math.min(this.whole, this.scroller.clientWidth);
    this.height = Math.min(this.whole, this.scroller.clientHeight);
    this.draw();
  }

  get whole() {
    return this.margin + this.n * this.size + 1;
  }

  get font() {
    return `12px ${getComputedStyle(this.scroller).fontFamily}`;
  }

  /** Return the cell at a point of the canvas, or null. A query or key of -1 is on the labels. */
  cellAt(x, y) {
    const { margin, size } = this;
    const index = (place, scrolled) =>
      place < margin ? -1 : Math.floor((place - margin + scrolled) / size);
    const key = index(x, this.scroller.scrollLeft);
    const query = index(y, this.scroller.scrollTop);
    return query < this.n && key < this.n ? { query, key } : null;
  }

  /** Scroll just enough to show a row or, with a key, a cell. */
  reveal(query, key = null) {
    const { scroller, size, margin } = this;
    const into = (at, scrolled, room) =>
      Math.min(at * size, Math.max(scrolled, (at + 1) * size + 1 - (room - margin)));
    scroller.scrollTop = into(query, scroller.scrollTop, scroller.clientHeight);
    if (key !== null) scroller.scrollLeft = into(key, scroller.scrollLeft, scroller.clientWidth);
  }

  draw() {
    if (!this.width) return;
    this.paint(sharpen(this.canvas, this.width, this.height), this.scroller);
  }

  /** Draw what is right of scrollLeft and below scrollTop. */
  paint(pen, { scrollLeft, scrollTop }) {
    pen.font = this.font;
    pen.textBaseline = "middle";
    inside(pen, this.margin, this.margin, this.width, this.height, () => {
      pen.translate(this.margin - scrollLeft, this.margin - scrollTop);
      this.drawCells(pen);
    });
    inside(pen, 0, this.margin, this.margin, this.height, () => {
      pen.translate(0, this.margin - scrollTop);
      this.drawLabels(pen, scrollTop, this.marks.point?.query, this.marks.pinned);
    });
    inside(pen, this.margin, 0, this.width, this.margin, () => {
      pen.translate(this.margin - scrollLeft, this.margin);
      pen.rotate(-Math.PI / 2);
      this.drawLabels(pen, scrollLeft, this.marks.point?.key, -1, true);
    });
  }

  drawCells(pen) {
    const whole = this.n * this.size;
    pen.fillStyle = hatching(pen, this.colours);
    pen.fillRect(0, 0, whole, whole);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.image, 0, 0, whole, whole);
    if (this.size >= 9) this.drawGaps(pen, whole);
    const { colours, marks } = this;
    const { pinned, point } = marks;
    this.frame(pen, colours.accent, 0, pinned, this.n, 1);
    if (point && point.query >= 0) this.frame(pen, colours.quiet, 0, point.query, this.n, 1);
    if (point && point.key >= 0) this.frame(pen, colours.quiet, point.key, 0, 1, this.n);
    if (point && point.query >= 0 && point.key >= 0)
      this.frame(pen, colours.text, point.key, point.query, 1, 1);
  }

  drawGaps(pen, whole) {
    pen.strokeStyle = this.colours.surface;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let at = 0; at <= whole; at += this.size) {
      pen.moveTo(at, 0);
      pen.lineTo(at, whole);
      pen.moveTo(0, at);
      pen.lineTo(whole, at);
    }
    pen.stroke();
  }

  /** Draw a frame around `columns` × `rows` cells. */
  frame(pen, colour, key, query, columns, rows) {
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(key * this.size, query * this.size, columns * this.size, rows * this.size);
  }

  /** Draw the tokens along an axis: as many as fit, and always the marked ones. */
  drawLabels(pen, scrolled, pointed, pinned, upright = false) {
    const every = Math.ceil(LINE / this.size);
    const first = Math.max(0, Math.floor(scrolled / this.size) - 1);
    const side = upright ? this.width : this.height;
    const last = Math.min(this.n, first + Math.ceil(side / this.size) + 2);
    const marked = [pinned, pointed].filter((at) => at >= first && at < last);
    const free = (at) => !marked.some((one) => Math.abs(one - at) * this.size < LINE);
    const { accent, quiet, text } = this.colours;
    const special = { [pinned]: accent, [pointed]: text };
    for (let at = first; at < last; at++) {
      if (!(at in special) && (at % every || !free(at))) continue;
      pen.fillStyle = special[at] ?? quiet;
      pen.textAlign = upright ? "left" : "right";
      const middle = (at + 0.5) * this.size;
      pen.fillText(this.labels[at], upright ? 6 : this.margin - 6, middle, this.margin - 10);
    }
  }
}

/** Return the whole map as a Blob, in smaller cells if it is too large; null if it still is. */
export function asPng(map) {
  const canvas = document.createElement("canvas");
  const { cell, width, height } = map;
  const room = MOST_SIDE / devicePixelRatio - map.margin - 1;
  map.cell = Math.min(map.size, Math.max(1, Math.floor(room / map.n)));
  const side = map.whole;
  map.width = map.height = side;
  const pen = sharpen(canvas, side, side);
  pen.fillStyle = map.colours.surface;
  pen.fillRect(0, 0, side, side);
  map.paint(pen, { scrollLeft: 0, scrollTop: 0 });
  Object.assign(map, { cell, width, height });
  return new Promise((resolve) => canvas.toBlob(resolve));
}

/** Return the map as an SVG: one pixel for each weight, scaled without smoothing, and its labels. */
export function asSvg(map) {
  const { n, margin, colours, labels } = map;
  const cell = Math.max(LINE, map.size);
  const cells = document.createElement("canvas");
  cells.width = cells.height = n;
  cells.getContext("2d").drawImage(map.image, 0, 0);
  const side = margin + n * cell;
  const xmlns = "http://www.w3.org/2000/svg";
  const [x, width] = [margin, n * cell];
  // An href would load here, where the page's policy forbids it.
  const image = { "data-href": cells.toDataURL(), x, y: x, width, height: width };
  const names = labels.flatMap((label, i) => {
    const middle = margin + (i + 0.5) * cell + 4;
    const across = { transform: `translate(${middle} ${margin - 6}) rotate(-90)` };
    const down = { x: margin - 6, y: middle, "text-anchor": "end" };
    return [across, down].map((at) => makeSvg("text", { fill: colours.text, ...at }, label));
  });
  const drawing = makeSvg(
    "svg",
    { xmlns, viewBox: `0 0 ${side} ${side}`, "font-family": "monospace", "font-size": 12 },
    makeSvg("rect", { width: side, height: side, fill: colours.surface }),
    makeSvg("image", { ...image, "image-rendering": "pixelated" }),
    ...names,
  );
  const text = new XMLSerializer().serializeToString(drawing).replace("data-href", "href");
  return new Blob([text], { type: "image/svg+xml" });
}

function inside(pen, left, top, right, bottom, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, right - left, bottom - top);
  pen.clip();
  draw();
  pen.restore();
}

/** Shorten a token to the length of a label, keeping its beginning and its end. */
function label(token) {
  const text = [...visible(token)];
  if (text.length > LONGEST) text.splice(8, text.length - 13, "…");
  return text.join("");
}
