// The tokens of the text, shaded by how much one of them attends to each.

import { make } from "../common/dom.js";
import { formatWeight } from "./weights.js";
import { visible } from "../common/token_text.js";

export class TokenStrip {
  /**
   * Calls onpin(index) and onhover(index or null). The Tab key stops once; arrow keys move between
   * tokens.
   */
  constructor(element, onpin, onhover) {
    this.element = element;
    const index = (event) => {
      const button = event.target.closest("button");
      return button ? this.buttons.indexOf(button) : null;
    };
    element.addEventListener("click", (event) => index(event) !== null && onpin(index(event)));
    element.addEventListener("pointerover", (event) => onhover(index(event)));
    element.addEventListener("pointerleave", () => onhover(null));
    element.addEventListener("keydown", (event) => this.move(event));
  }

  setTokens(tokens) {
    const button = (token) => make("button", { type: "button", class: "token" }, visible(token));
    this.buttons = tokens.map(button);
    this.element.replaceChildren(...this.buttons);
  }

  /** Scroll just enough to show a token. */
  reveal(index) {
    const { offsetTop: top, offsetHeight: height } = this.buttons[index];
    const { scrollTop, clientHeight } = this.element;
    this.element.scrollTop = Math.min(top, Math.max(scrollTop, top + height - clientHeight));
  }

  /** Shade each token by its weight in a row; null is masked. */
  shade(row, pinned, palette) {
    this.buttons.forEach((button, i) => {
      const [background, ink] = row[i] === null ? ["", ""] : palette.pair(row[i]);
      button.style.background = background;
      button.style.color = ink;
      button.classList.toggle("masked", row[i] === null);
      button.title = row[i] === null ? "masked" : formatWeight(row[i]);
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
