// The popover of a token: its probability and those of the likeliest alternatives. All outputs
// share it. A pinned one has controls, and stays until it is left.

import { byId, clone, make } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { visible } from "../common/token_text.js";

const ORDINALS = ["first", "second", "third", "fourth", "fifth"];
export const N_CHOICES = ORDINALS.length; // likeliest tokens requested at each position
const GAP = 6; // pixels between a token and its popover

/** Return a token on one short line, with long indentation as a count. */
const short = (name) => visible(name).replace(/·{4,}/g, ({ length }) => `·×${length}`);

let described = null; // the element that the popover belongs to

export function start() {
  const popover = byId("token-popover");
  popover.addEventListener("focusout", ({ relatedTarget: to }) => {
    if (to && !popover.contains(to)) popover.hidePopover();
  });
}

const isPinned = () => byId("token-popover").matches("[popover='auto']:popover-open");

/** Show the tokens of a piece of text in the popover, beside its element. */
export function show(element, piece) {
  if (!isPinned()) open(element, "manual", "tooltip", about(piece));
  place();
}

/**
 * Show the popover of an element with controls: links, and alternatives for which fork(token,
 * alternative) returns what to do if they are taken, and not null. It gets the focus.
 */
export function pin(element, piece, { links, fork }) {
  open(element, "auto", "dialog", [...about(piece, fork), ...links]);
  place();
  byId("token-popover").querySelector("button, a")?.focus({ preventScroll: true });
}

/** Hide the popover, unless it is pinned. */
export function hide() {
  if (!isPinned()) unpin();
}

/** Hide the popover. */
export const unpin = () => byId("token-popover").hidePopover();

/** Open the popover: a "manual" one stays where it is, an "auto" one is left by Escape or a click. */
function open(element, kind, role, content) {
  const popover = byId("token-popover");
  Object.assign(popover, { popover: kind, role });
  popover.replaceChildren(...content);
  popover.showPopover();
  described?.removeAttribute("aria-describedby");
  described = element;
  described.setAttribute("aria-describedby", "token-popover");
}

function place() {
  const popover = byId("token-popover");
  const at = described.getClientRects()[0] ?? described.getBoundingClientRect();
  const { offsetWidth, offsetHeight } = popover;
  const { clientWidth, clientHeight } = document.documentElement;
  const fitsBelow = at.bottom + GAP + offsetHeight <= clientHeight;
  popover.style.top = `${fitsBelow ? at.bottom + GAP : Math.max(0, at.top - GAP - offsetHeight)}px`;
  popover.style.left = `${Math.max(GAP, Math.min(at.left, clientWidth - offsetWidth - GAP))}px`;
}

function about({ text, tokens }, fork) {
  const blocks = tokens.map((token) => aboutToken(token, fork));
  if (tokens.length > 1)
    blocks.unshift(make("p", {}, `${tokens.length} tokens form ${short(text)}`));
  else if (text === "")
    blocks.push(make("p", { class: "quiet" }, "Not part of the text: an end or special token."));
  return blocks;
}

function aboutToken(token, fork) {
  const { name, logprob, top } = token;
  const rank = top.filter((one) => one.logprob > logprob).length;
  const choice =
    rank < N_CHOICES
      ? `the model's ${ORDINALS[rank]} choice`
      : `not among the model's first ${N_CHOICES} choices`;
  const shown = top.some((one) => one.name === name) ? top : [...top, token];
  const bars = shown.map((one) =>
    one.name === name ? bar(one, null, "chosen") : bar(one, fork?.(token, one)),
  );
  return clone("token-template", { name: short(name), choice, bars: [{}, ...bars] });
}

function bar({ name, logprob }, onclick, className) {
  const share = Math.exp(logprob);
  const row = clone("bar-template", {
    name: short(name),
    share: [{ style: { width: `${share * 100}%` } }],
    percent: formatShare(share),
  });
  const button = { type: "button", title: "Go on with this token instead", onclick };
  return make("li", { class: className }, onclick ? make("button", button, ...row.childNodes) : row);
}
