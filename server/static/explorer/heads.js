// Thumbnails of heads: those of one layer, and an overview of all layers.

import { make } from "../common/dom.js";
import { hatching, sharpen, weightImage } from "./weight_image.js";

/** Radio buttons with a picture each, one row per layer. `name` is the name of the radio group. */
export class Heads {
  constructor(element, name, side, onchoose) {
    Object.assign(this, { element, name, side, onchoose, rows: new Map(), drawn: new Map() });
    element.addEventListener("keydown", (event) => this.changeRow(event));
  }

  /** Create the buttons. If `titled`, the number of each head stands below it. */
  setHeads(layers, heads, titled) {
    this.rows = new Map(
      layers.map((layer) => [layer, heads.map((head) => this.button(layer, head, titled))]),
    );
    const rows = [...this.rows].map(([layer, buttons]) => {
      const title = titled ? [] : [make("span", { class: "quiet" }, `${layer}`)];
      return make("div", { class: "heads-row" }, ...title, ...buttons);
    });
    this.drawn.clear();
    this.element.replaceChildren(...rows);
  }

  button(layer, head, titled) {
    const select = () => this.onchoose(layer, head);
    const label = `layer ${layer}, head ${head}`;
    const value = `${layer}.${head}`;
    return make(
      "label",
      { class: "head", title: label },
      make("input", {
        type: "radio",
        name: this.name,
        "aria-label": label,
        value,
        onchange: select,
      }),
      make("canvas", { "aria-hidden": "true", width: this.side, height: this.side }),
      ...(titled ? [make("span", {}, `${head}`)] : []),
    );
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
        const [before, by] = this.drawn.get(button) ?? [];
        if (before === weights && by === palette) return;
        this.drawn.set(button, [weights, palette]);
        const pen = sharpen(button.querySelector("canvas"), this.side, this.side);
        button.classList.toggle("missing", !weights);
        if (weights)
          this.paint(pen, weightImage(weights, explanation.n, maskAt(layer), palette), colours);
      });
    }
  }

  paint(pen, image, colours) {
    pen.fillStyle = hatching(pen, colours);
    pen.fillRect(0, 0, this.side, this.side);
    pen.imageSmoothingEnabled = image.width > this.side;
    pen.drawImage(image, 0, 0, this.side, this.side);
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
