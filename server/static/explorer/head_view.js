// One head of one text: its heat map, the text shaded by one row, the weight under the pointer, and
// a table.

import { byId, make } from "../common/dom.js";
import { CELL, HeatMap } from "./heatmap.js";
import { listen } from "./heatmap_input.js";
import { quoted, visible } from "../common/token_text.js";
import { TokenStrip } from "./token_strip.js";
import { check, formatWeight, isVisible } from "./weights.js";
import { sharpen } from "./weight_image.js";

const TOLERANCE = 1e-4; // of a sum of 32-bit numbers

export class HeadView {
  constructor() {
    this.map = new HeatMap(byId("map"));
    const pin = (query) => {
      this.pin(query);
      this.map.reveal(query);
    };
    this.strip = new TokenStrip(byId("strip"), pin, (query) => this.hover(query));
    listen(this.map, (cell, byKeyboard) => this.point(cell, byKeyboard), pin);
    byId("row-details").addEventListener("toggle", () => this.fillTable());
    const zoom = byId("zoom");
    Object.assign(zoom, { min: CELL.least, max: CELL.most });
    zoom.addEventListener("input", () => this.map.zoom(zoom.valueAsNumber));
  }

  /**
   * Show a head. In a new text a decoder's last token is pinned, because it predicts the next one,
   * and an encoder's first, which may stand for the text.
   */
  show(explanation, layer, head, mask, palette) {
    const isNew = explanation !== this.explanation;
    Object.assign(this, {
      explanation,
      mask,
      palette,
      weights: explanation.weights(layer, head),
    });
    if (isNew) this.reset(explanation);
    this.map.show({ tokens: explanation.tokens, weights: this.weights, mask, palette });
    if (isNew) this.map.reveal(this.pinned);
    byId("map").setAttribute("aria-label", `Attention weights of layer ${layer}, head ${head}`);
    drawLegend(palette);
    this.showChecks();
    this.pin(this.pinned);
  }

  reset({ tokens, n }) {
    this.strip.setTokens(tokens);
    this.map.zoom(0);
    this.map.marks = { pinned: this.mask.causal ? n - 1 : 0, point: null };
    this.map.cursor = null;
    byId("zoom").value = this.map.size;
  }

  get pinned() {
    return this.map.marks.pinned;
  }

  pin(query) {
    this.map.mark({ pinned: query, point: this.map.marks.point });
    this.strip.reveal(query);
    this.fillTable();
    this.showRow();
  }

  /** Point at a cell. With null, show the keyboard's cell or else the pinned row. */
  point(cell, byKeyboard) {
    this.map.mark({ pinned: this.pinned, point: cell ?? this.map.cursor });
    // A pointer passes too many cells to announce each.
    byId("weight").setAttribute("aria-live", byKeyboard ? "polite" : "off");
    this.showRow();
  }

  hover(index) {
    this.point(index === null ? null : { query: index, key: -1 }, false);
  }

  /** Return the weights of a row, null where masked. */
  row(query) {
    const { n } = this.explanation;
    const row = Array.from(this.weights.subarray(query * n, (query + 1) * n));
    return row.map((weight, key) => (isVisible(query, key, this.mask) ? weight : null));
  }

  /** Shade the text by the row under the pointer, or the pinned one, and show one weight of it. */
  showRow() {
    const { tokens } = this.explanation;
    const { point, pinned } = this.map.marks;
    const query = point && point.query >= 0 ? point.query : pinned;
    const row = this.row(query);
    byId("strip-token").textContent = quoted(tokens[query]);
    this.strip.shade(row, pinned, this.palette);
    const isCell = point && point.key >= 0;
    const key = isCell ? point.key : row.indexOf(Math.max(...row));
    this.showWeight(query, key, row[key], isCell ? "" : "most ");
  }

  showWeight(query, key, weight, most) {
    const { tokens, n } = this.explanation;
    const isLater = this.mask.causal && key > query;
    const reason = isLater ? "comes later" : "is outside the window";
    const [queryToken, keyToken] = [quoted(tokens[query]), quoted(tokens[key])];
    const text =
      weight !== null
        ? `${queryToken} attends ${most}to ${keyToken}: ${formatWeight(weight)}`
        : `${queryToken} does not see ${keyToken}, which ${reason}`;
    byId("weight").replaceChildren(
      text,
      " ",
      make("span", { class: "quiet" }, `row ${query}, column ${key} of ${n}`),
    );
  }

  fillTable() {
    if (!byId("row-details").open || !this.weights) return;
    const { tokens } = this.explanation;
    byId("row-caption").textContent =
      `Attention of ${quoted(tokens[this.pinned])} at position ${this.pinned}, largest first`;
    const seen = this.row(this.pinned)
      .map((weight, key) => ({ weight, key }))
      .filter(({ weight }) => weight !== null);
    const rows = seen
      .sort((a, b) => b.weight - a.weight)
      .map(({ weight, key }) =>
        make(
          "tr",
          {},
          make("td", { class: "number" }, `${key}`),
          make("td", { class: "token-name" }, visible(tokens[key])),
          make("td", { class: "number" }, formatWeight(weight)),
        ),
      );
    byId("row-body").replaceChildren(...rows);
  }

  /** Check the weights: rows must sum to 1, and masked cells must be 0. */
  showChecks() {
    const { causal, window } = this.mask;
    const { deviation, leak } = check(this.weights, this.explanation.n, this.mask);
    const places = [causal && "above the diagonal", window !== null && "outside the window"];
    const hidden = places.filter(Boolean).join(" or ");
    const sums = deviation <= TOLERANCE ? "rows sum to 1" : "rows do not sum to 1";
    const rest = leak === 0 ? "nothing" : `up to ${leak.toExponential(1)}`;
    const masked = hidden && ` · ${rest} ${hidden}`;
    const broken = deviation > TOLERANCE || leak > 0;
    byId("contract").textContent =
      `${broken ? "✗" : "✓"} ${sums} (largest deviation ${deviation.toExponential(1)})${masked}`;
    byId("contract").className = broken ? "error" : "quiet";
  }
}

function drawLegend(palette) {
  const [width, height] = [160, 12];
  const pen = sharpen(byId("legend"), width, height);
  for (let x = 0; x < width; x++) {
    const share = x / (width - 1);
    [pen.fillStyle] = palette.pair(palette.emphasised ? share ** 2 : share);
    pen.fillRect(x, 0, 1, height);
  }
  byId("legend-middle").textContent = palette.emphasised ? "0.25" : "0.5";
}
