// Thumbnails of heads: those of one layer, and an overview of all layers.

import { clone, make } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { hatching, sharpen, weightImage } from "./weight_image.js";

/** Return a head's measured shares of attention, or "" for a text too short to measure them. */
export function describe({ behaviour, shares }) {
  const parts = Object.entries(shares ?? {}).sort(([, a], [, b]) => b - a);
  const measured = parts.map(([kind, share]) => `${kind} ${formatShare(share)}`).join(", ");
  return measured && `${behaviour ? `${behaviour} head · ` : ""}${measured} of its attention`;
}

/**
 * Radio buttons with a picture each, one row per layer. `name` is the name of the radio group; the
 * styles choose which labels it shows.
 */
export class Heads {
  constructor(element, name, side, onchoose) {
    Object.assign(this, { element, name, side, onchoose, rows: new Map(), drawn: new Map() });
    element.addEventListener("keydown", (event) => this.changeRow(event));
  }

  /** Create the buttons; headsAt: returns the heads of a layer. */
  setHeads(layers, headsAt) {
    this.rows = new Map(
      layers.map((layer) => [layer, headsAt(layer).map((head) => this.button(layer, head))]),
    );
    const rows = [...this.rows].map(([layer, buttons]) => {
      const name = make("span", { class: "quiet" }, `${layer}`);
      return make("div", { class: "heads-row flow" }, name, ...buttons);
    });
    this.drawn.clear();
    this.element.replaceChildren(...rows);
  }

  button(layer, head) {
    const input = {
      name: this.name,
      value: `${layer}.${head}`,
      "aria-label": `layer ${layer}, head ${head}`,
      onchange: () => this.onchoose(layer, head),
    };
    const canvas = { width: this.side, height: this.side };
    return clone("head-choice", { input: [input], canvas: [canvas], number: `${head}` });
  }

  select(layer, head) {
    const chosen = this.rows.get(layer)?.[head]?.querySelector("input");
    if (chosen) chosen.checked = true;
  }

  /** Draw the heads that have been fetched and not drawn yet. The others stay empty. */
  draw(explanation, maskAt, palette, colours) {
    for (const [layer, buttons] of this.rows) {
      buttons.forEach((button, head) => {
        const weights = explanation.weights(layer, head);
        const name = `${layer}.${head}`;
        const known = explanation.behaviours.get(name);
        button.classList.toggle("off", explanation.without.includes(name));
        button.title = [`layer ${layer}, head ${head}`, known && describe(known)]
          .filter(Boolean)
          .join(": ");
        button.querySelector("small").textContent = known?.behaviour ?? "";
        const [before, by] = this.drawn.get(button) ?? [];
        if (before === weights && by === palette) return;
        this.drawn.set(button, [weights, palette]);
        button.classList.toggle("missing", !weights);
        const pen = sharpen(button.querySelector("canvas"), this.side, this.side);
        if (!weights) return;
        const scale = palette.upTo(explanation.most(layer, head));
        const image = weightImage(weights, explanation.n, maskAt(layer), scale);
        pen.fillStyle = hatching(pen, colours);
        pen.fillRect(0, 0, this.side, this.side);
        pen.imageSmoothingEnabled = image.width > this.side;
        pen.drawImage(image, 0, 0, this.side, this.side);
      });
    }
  }

  /** Move to the same head of another layer. By default browsers move to the next head. */
  changeRow(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step || this.rows.size < 2) return;
    const [layer, head] = event.target.value.split(".").map(Number);
    const button = this.rows.get(layer + step)?.[head]?.querySelector("input");
    event.preventDefault();
    button?.focus();
    button?.click();
  }
}
