// A line chart of the last two minutes. Its values can be read with a pointer or the arrow keys.

import { byId } from "../common/dom.js";
import { SHOWN_SECONDS } from "./figures.js";
import { formatCount, formatRough, formatSeconds, formatShare } from "../common/format.js";

const BREAK_SECONDS = 3; // a longer gap between points interrupts the line
const UNITS = {
  count: { format: formatCount, leastTop: 4 },
  rate: { format: formatRough, leastTop: 10 },
  share: { format: formatShare, leastTop: 1 },
  seconds: { format: formatSeconds, leastTop: 0.001 },
};

/** Format a figure of this unit; null is –. */
export const formatFigure = (value, unit) => (value === null ? "–" : UNITS[unit].format(value));

/** A chart in `element`: data-series lists keys of the points, data-unit is one of UNITS. */
export class Chart {
  #points = [];
  #cursor = null; // seconds ago
  #element;
  #slider;
  #series;
  #unit;

  constructor(element, name) {
    this.#element = element;
    this.#series = element.dataset.series.split(" ");
    this.#unit = element.dataset.unit;
    element.append(byId("chart-template").content.cloneNode(true));
    this.#part("svg").setAttribute("viewBox", `0 0 ${SHOWN_SECONDS} 100`);
    this.#slider = this.#part("input");
    const slider = this.#slider;
    Object.assign(slider, { min: -SHOWN_SECONDS, value: 0, ariaLabel: `${name}, last two minutes` });
    slider.addEventListener("pointermove", (event) => {
      const box = slider.getBoundingClientRect();
      this.#point(-Math.round(SHOWN_SECONDS * (1 - (event.clientX - box.left) / box.width)));
    });
    for (const type of ["pointerleave", "blur"])
      slider.addEventListener(type, () => this.#point(null));
    for (const type of ["focus", "input"])
      slider.addEventListener(type, () => this.#point(slider.valueAsNumber));
  }

  #part(selector) {
    return this.#element.querySelector(selector);
  }

  /** Draw points { at, key: value or null }. The last point is now. */
  update(points) {
    this.#points = points;
    const top = topOf(points, this.#series, UNITS[this.#unit].leastTop);
    this.#part(".chart-top").textContent = formatFigure(top, this.#unit);
    for (const [index, key] of this.#series.entries()) {
      const segments = segmentsOf(points, key, top);
      this.#part(`.line-${index}`).setAttribute("d", segments.map((one) => `M${join(one)}`).join(""));
      if (this.#series.length === 1) this.#part(".area").setAttribute("d", areaOf(segments));
    }
    this.#showCursor();
    if (document.activeElement !== this.#slider) this.#slider.ariaValueText = this.#summary();
  }

  /** Move the cursor, or remove it with null. Only this announces a value to screen readers. */
  #point(place) {
    this.#cursor = place === null ? null : -Math.min(Math.max(place, -SHOWN_SECONDS), 0);
    this.#showCursor();
    this.#slider.ariaValueText = this.#describe(this.#cursor ?? 0);
  }

  #showCursor() {
    const isShown = this.#cursor !== null;
    const [rule, readout] = [this.#part(".chart-rule"), this.#part(".chart-readout")];
    rule.hidden = !isShown;
    readout.textContent = isShown ? this.#describe(this.#cursor) : "";
    rule.style.left = `${100 - (100 * (this.#cursor ?? 0)) / SHOWN_SECONDS}%`;
  }

  #describe(secondsAgo) {
    const point = nearest(this.#points, secondsAgo);
    const when = secondsAgo ? `${secondsAgo} s ago` : "now";
    if (point === undefined) return `${when}: not measured`;
    const figures = this.#series.map((key) => {
      const figure = formatFigure(point[key], this.#unit);
      return this.#series.length === 1 ? figure : `${key.split("-")[1]} ${figure}`;
    });
    return `${when}: ${figures.join(", ")}`;
  }

  /** Describe the whole chart for screen readers, which read it on focus and not every second. */
  #summary() {
    const texts = this.#series.map((key) => {
      const values = this.#points.map((point) => point[key]).filter((value) => value !== null);
      const range = values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
      return range.map((value) => formatFigure(value, this.#unit)).join(" to ");
    });
    return `${this.#describe(0)}; in the last two minutes ${texts.join(", ")}`;
  }
}

/** Return the least of 1, 2, 5 × 10ⁿ that is not below any value. */
function topOf(points, series, least) {
  const most = Math.max(least, ...points.flatMap((point) => series.map((key) => point[key] ?? 0)));
  const power = 10 ** Math.floor(Math.log10(most));
  return power * ([1, 2, 5].find((step) => step * power >= most) ?? 10);
}

/** Return the points as segments without gaps: [[x, y]], with y from the top. */
function segmentsOf(points, key, top) {
  const now = points.at(-1).at;
  const segments = [];
  let last = -Infinity;
  for (const { at, [key]: value } of points.filter((point) => point[key] !== null)) {
    if (at - last > BREAK_SECONDS) segments.push([]);
    last = at;
    segments.at(-1).push([SHOWN_SECONDS - (now - at), 100 - (100 * value) / top]);
  }
  return segments;
}

const join = (places) => places.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");

const areaOf = (segments) =>
  segments
    .map((places) => `M${places[0][0]} 100L${join(places)}L${places.at(-1)[0]} 100Z`)
    .join("");

function nearest(points, secondsAgo) {
  const at = (points.at(-1)?.at ?? 0) - secondsAgo;
  const distance = (point) => Math.abs(point.at - at);
  const close = points.filter((point) => distance(point) <= BREAK_SECONDS / 2);
  return close.sort((one, other) => distance(one) - distance(other))[0];
}
