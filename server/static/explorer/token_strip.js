// The text as tokens, shaded by how much one of them takes from each.

import { make } from "../shared/dom.js";
import { formatWeight } from "./weights.js";
import { visible } from "../shared/token_text.js";

export class TokenStrip {
  /** Calls onpin(index) for a click and onhover(index or null). One stop for the Tab key; arrows go on from there. */
  constructor(place, onpin, onhover) {
    this.place = place;
    const index = (event) => {
      const button = event.target.closest("button");
      return button ? this.buttons.indexOf(button) : null;
    };
    place.addEventListener("click", (event) => index(event) !== null && onpin(index(event)));
    place.addEventListener("pointerover", (event) => onhover(index(event)));
    place.addEventListener("pointerleave", () => onhover(null));
    place.addEventListener("keydown", (event) => this.move(event));
  }

  lay(tokens) {
    const button = (token) => make("button", { type: "button", class: "token" }, visible(token));
    this.buttons = tokens.map(button);
    this.place.replaceChildren(...this.buttons);
  }

  /** Scroll as little as it takes to see a token. */
  reveal(index) {
    const { offsetTop: top, offsetHeight: height } = this.buttons[index];
    const { scrollTop, clientHeight } = this.place;
    this.place.scrollTop = Math.min(top, Math.max(scrollTop, top + height - clientHeight));
  }

  /** Shade each token by its weight in a row; null is masked. */
  shade(row, pinned, palette) {
    this.buttons.forEach((button, i) => {
      const [background, ink] = row[i] === null ? ["", ""] : palette.pair(row[i]);
      button.style.background = background;
      button.style.color = ink;
      button.classList.toggle("masked", row[i] === null);
      button.title = row[i] === null ? "not seen from there" : formatWeight(row[i]);
      button.setAttribute("aria-pressed", i === pinned);
      button.tabIndex = i === pinned ? 0 : -1;
    });
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const to = this.buttons[this.buttons.indexOf(event.target) + step];
    if (!to) return;
    event.preventDefault();
    to.focus();
    to.click();
  }
}
