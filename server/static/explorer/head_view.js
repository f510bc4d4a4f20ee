// One head of one text: its heat map, the text shaded by one row, and the weight under the pointer.

import { download } from "../common/copying.js";
import { byId, make, showError } from "../common/dom.js";
import { asPng, asSvg, CELL, HeatMap } from "./heatmap.js";
import { listen } from "./heatmap_input.js";
import { quoted } from "../common/token_text.js";
import { TokenStrip } from "./token_strip.js";
import { check, formatWeight, isVisible } from "./weights.js";

const TOLERANCE = 1e-4; // of a sum of 32-bit numbers

export class HeadView {
  /** onpin: called after the user has pinned a row. */
  constructor(onpin) {
    this.map = new HeatMap(byId("map"));
    this.wanted = null; // { row } to pin when a head is next shown; null: the usual one
    const pin = (query) => {
      this.pin(query);
      this.map.reveal(query);
      onpin();
    };
    this.strip = new TokenStrip(byId("strip"), pin, (query) => this.hover(query));
    listen(this.map, (cell, byKeyboard) => this.point(cell, byKeyboard), pin);
    const name = () => `attention-${this.head.layer}-${this.head.head}`;
    byId("as-svg").addEventListener("click", () => download(`${name()}.svg`, asSvg(this.map)));
    byId("as-png").addEventListener("click", async () => {
      const picture = await asPng(this.map);
      if (picture) download(`${name()}.png`, picture);
      else showError(byId("explain-error"), "This browser makes no PNG so large: save an SVG.");
    });
    const zoom = byId("zoom");
    Object.assign(zoom, { min: CELL.least, max: CELL.most });
    zoom.addEventListener("input", () => this.map.zoom(zoom.valueAsNumber));
  }

  /** Show a head. In a new text, or where a row is wanted, pin that or the usual one. */
  show(explanation, layer, head, mask, colours, isRecurrent) {
    const isNew = explanation.text !== this.explanation?.text || this.wanted !== null;
    const weights = explanation.weights(layer, head);
    const palette = colours.upTo(explanation.most(layer, head));
    Object.assign(this, { isRecurrent });
    Object.assign(this, { explanation, head: { layer, head }, mask, palette, weights });
    if (isNew) this.reset(explanation);
    this.map.show({ tokens: explanation.tokens, weights, mask, palette });
    if (isNew) this.map.reveal(this.pinned);
    const what = isRecurrent ? "Memory" : "Attention weights";
    byId("map").setAttribute("aria-label", `${what} of layer ${layer}, head ${head}`);
    byId("strip-kind").textContent = isRecurrent ? "memory" : "attention";
    drawLegend(palette);
    this.showChecks();
    this.pin(this.pinned);
  }

  reset({ tokens, n }) {
    this.strip.setTokens(tokens);
    this.map.zoom(0);
    this.map.marks = { pinned: Math.min(this.wanted?.row ?? this.usual, n - 1), point: null };
    this.wanted = null;
    this.map.cursor = null;
    byId("zoom").value = this.map.size;
  }

  /** A decoder's last token, which predicts the next one; an encoder's first, for its text. */
  get usual() {
    return this.mask.causal ? this.explanation.n - 1 : 0;
  }

  get pinned() {
    return this.map.marks.pinned;
  }

  pin(query) {
    this.map.mark({ pinned: query, point: this.map.marks.point });
    this.strip.reveal(query);
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
    const sizes = row.map(Math.abs); // of null: 0
    const key = isCell ? point.key : sizes.indexOf(Math.max(...sizes));
    this.showWeight(query, key, row[key], isCell ? "" : "most ");
  }

  showWeight(query, key, weight, most) {
    const { tokens, n } = this.explanation;
    const isLater = this.mask.causal && key > query;
    const reason = isLater ? "comes later" : "is outside the window";
    const [queryToken, keyToken] = [quoted(tokens[query]), quoted(tokens[key])];
    const read = this.isRecurrent
      ? `${queryToken} reads ${most}of ${keyToken}`
      : `${queryToken} attends ${most}to ${keyToken}`;
    const left = `at ${queryToken} there is left of ${keyToken}, by decay`;
    const said = this.isRecurrent && !this.explanation.reads ? left : read;
    const text =
      weight !== null
        ? `${said}: ${formatWeight(weight)}`
        : `${queryToken} does not see ${keyToken}, which ${reason}`;
    const place = make("span", { class: "quiet" }, `row ${query}, column ${key} of ${n}`);
    byId("weight").replaceChildren(text, " ", place);
  }

  /** Check the weights: rows must sum to 1, and masked cells must be 0. */
  showChecks() {
    const { causal, window } = this.mask;
    const { deviation, leak } = check(this.weights, this.explanation.n, this.mask);
    const places = [causal && "above the diagonal", window !== null && "outside the window"];
    const hidden = places.filter(Boolean).join(" or ");
    byId("contract").hidden = this.isRecurrent;
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
  const weights = Array.from({ length: 17 }, (_, i) => (i / 16) ** (palette.emphasised ? 2 : 1));
  const stops = weights.map((weight) => palette.pair(weight * palette.most)[0]);
  byId("legend").style.background = `linear-gradient(to right, ${stops})`;
  const short = (weight) => `${Number((weight * palette.most).toPrecision(3))}`;
  byId("legend-middle").textContent = short(palette.emphasised ? 0.25 : 0.5);
  byId("legend-most").textContent = palette.most === 1 ? "1" : `±${short(1)}`;
}
