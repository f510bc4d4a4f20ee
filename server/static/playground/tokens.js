// A streamed text with one span per token, shaded by its probability. Arrow keys move between the
// tokens.

import { make } from "../common/dom.js";
import { hide, show } from "./popover.js";
import { revealed } from "../common/token_text.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // least probabilities; the last level is below all
const NEAR = 8; // pixels from the end within which scrolling follows the text
const before = (span) => span.previousElementSibling;
const after = (span) => span.nextElementSibling;
const TARGETS = {
  ArrowLeft: before,
  ArrowUp: before,
  ArrowRight: after,
  ArrowDown: after,
  Home: (span) => span.parentElement.firstElementChild,
  End: (span) => span.parentElement.lastElementChild,
};

const levelOf = (tokens) => {
  const likelihood = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
  const level = LEVELS.findIndex((least) => likelihood >= least);
  return level < 0 ? LEVELS.length : level;
};

export class TokenText {
  #pieces = new Map(); // by element
  #waiting = [];
  #frame = null;
  #described = null;

  /**
   * Shows pieces in `element`, whose parent scrolls and lies in a card. Calls `drawn` after each
   * batch.
   */
  constructor(element, drawn) {
    this.element = element;
    this.box = element.parentElement;
    this.card = element.closest(".card");
    this.drawn = drawn;
    element.addEventListener("pointerover", (event) =>
      this.#describe(event.target.closest("[tabindex]")),
    );
    element.addEventListener("pointerleave", () => this.#describe(this.#focused()));
    element.addEventListener("focusin", (event) => this.#arrive(event.target));
    element.addEventListener("focusout", () => this.#describe(null));
    element.addEventListener("keydown", (event) => this.#onKey(event));
    const follow = () => this.#described && this.#describe(this.#described);
    window.addEventListener("scroll", follow, { capture: true, passive: true });
    window.addEventListener("keydown", (event) => event.key === "Escape" && this.#describe(null));
  }

  get text() {
    return [...this.#pieces.values(), ...this.#waiting].map((piece) => piece.text).join("");
  }

  /** Add pieces. They are drawn once per frame, because a fast model sends several in that time. */
  add(pieces) {
    this.#waiting.push(...pieces);
    if (pieces.length) this.#frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.follow(() => this.element.append(...this.#waiting.map((piece) => this.#span(piece))));
    this.#waiting = [];
    this.drawn();
  }

  /**
   * Make a change of the card. If its end, or the end of its text, was in view, keep it in view.
   */
  follow(change) {
    const isAtEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - NEAR;
    const isInSight = this.card.getBoundingClientRect().bottom <= innerHeight + NEAR;
    change();
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    if (isInSight) this.card.scrollIntoView({ block: "nearest" });
  }

  clear() {
    this.#describe(null);
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.#waiting = [];
    this.#pieces.clear();
    this.element.replaceChildren();
  }

  #span(piece) {
    const { text, tokens } = piece;
    const attributes = { tabindex: this.#pieces.size ? -1 : 0 };
    if (tokens.length) attributes["data-level"] = levelOf(tokens);
    if (text === "") attributes.class = "outside";
    else if (text.includes("\n")) attributes.class = "break";
    const span = make(
      "span",
      attributes,
      ...revealed(text || tokens.map((token) => token.name).join("")),
    );
    this.#pieces.set(span, piece);
    return span;
  }

  #focused() {
    return this.#pieces.has(document.activeElement) ? document.activeElement : null;
  }

  #describe(span) {
    if (this.#described) hide(this.#described);
    this.#described = this.#pieces.get(span)?.tokens.length ? span : null;
    if (this.#described) show(span, this.#pieces.get(span));
  }

  #onKey(event) {
    const from = this.#focused();
    const to = from && TARGETS[event.key]?.(from);
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    to.focus();
  }

  /** Move the focus to a token. The Tab key stops at one token only: the one focused last. */
  #arrive(span) {
    this.element.querySelector("[tabindex='0']").setAttribute("tabindex", "-1");
    span.setAttribute("tabindex", "0");
    this.#describe(span);
  }
}
