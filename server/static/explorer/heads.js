// Heads side by side, small: those of one layer to choose from, and those of all layers to look over.

import { make } from "../shared/dom.js";
import { hatching, sharpen, weightImage } from "./weight_image.js";

/** Radio buttons with a picture each, a row for each layer; `name` tells groups apart. */
export class Heads {
  constructor(place, name, side, onchoose) {
    Object.assign(this, { place, name, side, onchoose, rows: new Map(), drawn: new Map() });
    place.addEventListener("keydown", (event) => this.changeRow(event));
  }

  /** Make the buttons. `titled`: a head's number stands under it. */
  lay(layers, heads, titled) {
    this.rows = new Map(
      layers.map((layer) => [layer, heads.map((head) => this.button(layer, head, titled))]),
    );
    const rows = [...this.rows].map(([layer, buttons]) => {
      const title = titled ? [] : [make("span", { class: "quiet" }, `${layer}`)];
      return make("div", { class: "heads-row" }, ...title, ...buttons);
    });
    this.drawn.clear();
    this.place.replaceChildren(...rows);
  }

  button(layer, head, titled) {
    const choose = () => this.onchoose(layer, head);
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
        onchange: choose,
      }),
      make("canvas", { "aria-hidden": "true", width: this.side, height: this.side }),
      ...(titled ? [make("span", {}, `${head}`)] : []),
    );
  }

  choose(layer, head) {
    const chosen = this.rows.get(layer)?.[head]?.querySelector("input");
    if (chosen) chosen.checked = true;
  }

  /** Draw all that has come and is not drawn yet; the rest is left empty. */
  draw(reading, windows, palette, colours) {
    for (const [layer, buttons] of this.rows) {
      buttons.forEach((button, head) => {
        const weights = reading.weights(layer, head);
        const [before, by] = this.drawn.get(button) ?? [];
        if (before === weights && by === palette) return;
        this.drawn.set(button, [weights, palette]);
        const pen = sharpen(button.querySelector("canvas"), this.side, this.side);
        button.classList.toggle("lacking", !weights);
        if (weights)
          this.paint(pen, weightImage(weights, reading.n, windows(layer), palette), colours);
      });
    }
  }

  paint(pen, image, colours) {
    pen.fillStyle = hatching(pen, colours);
    pen.fillRect(0, 0, this.side, this.side);
    pen.imageSmoothingEnabled = image.width > this.side;
    pen.drawImage(image, 0, 0, this.side, this.side);
  }

  /** Up and down go to the same head of another layer; a browser's own would go to the next head. */
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
