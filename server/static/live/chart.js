// A line chart of the last two minutes. Its values can be read with a pointer or the arrow keys.

import { make, makeSvg } from "../common/dom.js";
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

/**
 * A chart in `element`. Its data-series lists keys of the points; its data-unit is one of UNITS.
 */
export class Chart {
  #points = [];
  #cursor = null; // seconds ago
  #parts;
  #series;
  #unit;

  constructor(element, name) {
    this.#series = element.dataset.series.split(" ");
    this.#unit = element.dataset.unit;
    const range = { type: "range", min: -SHOWN_SECONDS, max: 0, step: 1, value: 0 };
    this.#parts = {
      lines: this.#series.map((key, index) =>
        makeSvg("path", { class: `line line-${index}`, "data-key": key }),
      ),
      area: makeSvg("path", { class: "area" }),
      top: make("span", { class: "chart-top" }),
      rule: make("span", { class: "chart-rule", hidden: true }),
      slider: make("input", { ...range, "aria-label": `${name}, last two minutes` }),
      readout: make("span", { class: "chart-readout" }),
    };
    element.append(this.#plot(), this.#axis());
    this.#listen();
  }

  /** Draw points { at, key: value or null }. The last point is now. */
  update(points) {
    this.#points = points;
    const top = topOf(points, this.#series, UNITS[this.#unit].leastTop);
    this.#parts.top.textContent = UNITS[this.#unit].format(top);
    for (const [index, key] of this.#series.entries()) {
      this.#parts.lines[index].setAttribute("d", pathOf(points, key, top));
    }
    if (this.#series.length === 1)
      this.#parts.area.setAttribute("d", areaOf(points, this.#series[0], top));
    this.#showCursor();
    const { slider } = this.#parts;
    if (document.activeElement !== slider) slider.setAttribute("aria-valuetext", this.#summary());
  }

  #plot() {
    const { area, lines, top, rule, slider } = this.#parts;
    const svg = {
      viewBox: `0 0 ${SHOWN_SECONDS} 100`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    };
    return make(
      "div",
      { class: "chart-plot" },
      makeSvg("svg", svg, area, ...lines),
      top,
      rule,
      slider,
    );
  }

  #axis() {
    const ends = [make("span", {}, "2 min ago"), make("span", {}, "now")];
    return make(
      "div",
      { class: "chart-axis", "aria-hidden": "true" },
      ends[0],
      this.#parts.readout,
      ends[1],
    );
  }

  #listen() {
    const { slider } = this.#parts;
    slider.addEventListener("pointermove", (event) => {
      const box = slider.getBoundingClientRect();
      this.#point(-Math.round(SHOWN_SECONDS * (1 - (event.clientX - box.left) / box.width)));
    });
    slider.addEventListener("pointerleave", () => this.#point(null));
    slider.addEventListener("blur", () => this.#point(null));
    slider.addEventListener("focus", () => this.#point(slider.valueAsNumber));
    slider.addEventListener("input", () => this.#point(slider.valueAsNumber));
  }

  /** Move the cursor, or remove it with null. Only this announces a value to screen readers. */
  #point(place) {
    this.#cursor = place === null ? null : -Math.min(Math.max(place, -SHOWN_SECONDS), 0);
    this.#showCursor();
    this.#parts.slider.setAttribute("aria-valuetext", this.#describe(this.#cursor ?? 0));
  }

  #showCursor() {
    const { rule, readout } = this.#parts;
    rule.hidden = this.#cursor === null;
    readout.textContent = this.#cursor === null ? "" : this.#describe(this.#cursor);
    rule.style.left = `${100 - (100 * (this.#cursor ?? 0)) / SHOWN_SECONDS}%`;
  }

  #describe(secondsAgo) {
    const point = nearest(this.#points, secondsAgo);
    const when = secondsAgo ? `${secondsAgo} s ago` : "now";
    if (point === undefined) return `${when}: not measured`;
    return `${when}: ${this.#series.map((key) => this.#describeSeries(point, key)).join(", ")}`;
  }

  /** Describe the whole chart for screen readers, which read it on focus and not every second. */
  #summary() {
    const ranges = this.#series.map((key) => {
      const values = this.#points.map((point) => point[key]).filter((value) => value !== null);
      return values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
    });
    const texts = ranges.map((range) =>
      range.map((value) => formatFigure(value, this.#unit)).join(" to "),
    );
    return `${this.#describe(0)}; in the last two minutes ${texts.join(", ")}`;
  }

  #describeSeries(point, key) {
    const figure = formatFigure(point[key], this.#unit);
    return this.#series.length === 1 ? figure : `${key.split("-")[1]} ${figure}`;
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
  const now = points.at(-1)?.at;
  const segments = [];
  let last = null;
  for (const point of points) {
    if (point[key] === null) continue;
    if (last === null || point.at - last > BREAK_SECONDS) segments.push([]);
    last = point.at;
    segments.at(-1).push([SHOWN_SECONDS - (now - point.at), 100 - (100 * point[key]) / top]);
  }
  return segments;
}

const join = (places) => places.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");

const pathOf = (points, key, top) =>
  segmentsOf(points, key, top)
    .map((places) => `M${join(places)}`)
    .join("");

const areaOf = (points, key, top) =>
  segmentsOf(points, key, top)
    .map((places) => `M${places[0][0]} 100L${join(places)}L${places.at(-1)[0]} 100Z`)
    .join("");

function nearest(points, secondsAgo) {
  const at = (points.at(-1)?.at ?? 0) - secondsAgo;
  const close = points.filter((point) => Math.abs(point.at - at) <= BREAK_SECONDS / 2);
  return close.sort((one, other) => Math.abs(one.at - at) - Math.abs(other.at - at))[0];
}
