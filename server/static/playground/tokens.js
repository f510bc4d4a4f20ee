// A streamed text with one span per token, shaded by its probability. Arrow keys move between the
// tokens.

import { make } from "../common/dom.js";
import { hide, pin, show, unpin } from "./popover.js";
import { revealed } from "../common/token_text.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // least probabilities; the last level is below all
const NEAR = 8; // pixels from the end within which scrolling follows the text

const levelOf = (tokens) => {
  const likelihood = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
  const level = LEVELS.findIndex((least) => likelihood >= least);
  return level < 0 ? LEVELS.length : level;
};

export class TokenText {
  pieces = []; // the last ones may not be drawn yet
  #frame = null;
  #described = null;

  /**
   * Shows pieces in `element`, whose parent scrolls and lies in a card. Calls `drawn` after each
   * batch, and controls(piece) for what popover.js shows of a pinned one.
   */
  constructor(element, drawn, controls) {
    this.element = element;
    this.box = element.parentElement;
    this.card = element.closest(".card");
    this.drawn = drawn;
    this.controls = controls;
    const spanOf = ({ target }) => target.closest("[tabindex]");
    element.addEventListener("pointerover", (event) => this.#describe(spanOf(event)));
    element.addEventListener("pointerleave", () => this.#describe(document.activeElement));
    element.addEventListener("focusin", (event) => this.#arrive(event));
    element.addEventListener("focusout", () => this.#describe(null));
    element.addEventListener("keydown", (event) => this.#onKey(event));
    element.addEventListener("click", (event) => this.#pin(spanOf(event)));
    const follow = () => this.#described && this.#describe(this.#described);
    window.addEventListener("scroll", follow, { capture: true, passive: true });
    window.addEventListener("keydown", (event) => event.key === "Escape" && this.#describe(null));
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** Add pieces. They are drawn once per frame, because a fast model sends several in that time. */
  add(pieces) {
    this.pieces.push(...pieces);
    if (pieces.length) this.#frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.#frame = null;
    const undrawn = this.pieces.slice(this.element.childElementCount);
    this.follow(() => undrawn.forEach((piece) => this.element.append(this.#span(piece))));
    this.drawn();
  }

  /** Change the card. If its end, or the end of its text, was in view, keep it in view. */
  follow(change) {
    const isAtEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - NEAR;
    const isInSight = this.card.getBoundingClientRect().bottom <= innerHeight + NEAR;
    change();
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    if (isInSight) this.card.scrollIntoView({ block: "nearest" });
  }

  /** Mark the piece of this number; -1 marks none. */
  mark(index) {
    this.element.querySelector(".diverges")?.classList.remove("diverges");
    this.element.children[index]?.classList.add("diverges");
  }

  clear() {
    this.#described = null;
    this.pieces = [];
    this.element.replaceChildren();
    unpin(); // it would give the focus back to its token, were that still there
  }

  #span({ text, tokens }) {
    const attributes = {
      tabindex: this.element.childElementCount ? -1 : 0,
      "data-level": tokens.length ? levelOf(tokens) : null,
      class: text === "" ? "outside" : text.includes("\n") && "break",
    };
    const shown = text || tokens.map((token) => token.name).join("");
    return make("span", attributes, ...revealed(shown));
  }

  /** Return the piece of a span, if it has tokens to show. */
  #scored(span) {
    const piece = this.pieces[[...this.element.children].indexOf(span)];
    return piece?.tokens.length ? piece : null;
  }

  #describe(span) {
    if (this.#described) hide();
    const piece = this.#scored(span);
    this.#described = piece && span;
    if (piece) show(span, piece);
  }

  #pin(span) {
    const piece = this.#scored(span);
    if (piece) pin(span, piece, this.controls(piece));
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { target: from, key } = event;
    const { previousElementSibling: before, nextElementSibling: after } = from;
    const { firstElementChild: Home, lastElementChild: End } = this.element;
    const places = { ArrowLeft: before, ArrowUp: before, ArrowRight: after, ArrowDown: after };
    const to = { ...places, Home, End }[key];
    if (!to && key !== "Enter") return;
    event.preventDefault(); // or Enter would press the control that gets the focus
    if (to) to.focus();
    else this.#pin(from);
  }

  /** Move the focus to a token. The Tab key stops at one token only: the one focused last. */
  #arrive({ target, relatedTarget: from }) {
    this.element.querySelector("[tabindex='0']").setAttribute("tabindex", "-1");
    target.setAttribute("tabindex", "0");
    if (!from?.closest("[popover]")) this.#describe(target); // not again when a popover is left
  }
}
