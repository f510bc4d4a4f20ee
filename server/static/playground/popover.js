// The popover of a token: its probability and those of the likeliest alternatives. All outputs
// share it.

import { byId, make } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { visible } from "../common/token_text.js";

const ORDINALS = ["first", "second", "third", "fourth", "fifth"];
export const N_CHOICES = ORDINALS.length; // likeliest tokens requested at each position
const GAP = 6; // pixels between a token and its popover

/** Return a token on one short line, with long indentation as a count. */
const short = (name) => visible(name).replace(/·{4,}/g, ({ length }) => `·×${length}`);

/** Show the tokens of a piece of text in the popover, beside its element. */
export function show(element, piece) {
  const popover = byId("token-popover");
  popover.replaceChildren(...about(piece));
  popover.hidden = false;
  element.setAttribute("aria-describedby", popover.id);
  const at = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const { offsetWidth, offsetHeight } = popover;
  const { clientWidth, clientHeight } = document.documentElement;
  const fitsBelow = at.bottom + GAP + offsetHeight <= clientHeight;
  popover.style.top = `${fitsBelow ? at.bottom + GAP : Math.max(0, at.top - GAP - offsetHeight)}px`;
  popover.style.left = `${Math.max(GAP, Math.min(at.left, clientWidth - offsetWidth - GAP))}px`;
}

/** Hide the popover of an element. */
export function hide(element) {
  byId("token-popover").hidden = true;
  element?.removeAttribute("aria-describedby");
}

function about({ text, tokens }) {
  const blocks = tokens.map(aboutToken);
  if (tokens.length > 1)
    blocks.unshift(make("p", {}, `${tokens.length} tokens form ${short(text)}`));
  else if (text === "")
    blocks.push(make("p", { class: "quiet" }, "Not part of the text: an end or special token."));
  return blocks;
}

function aboutToken({ name, logprob, top }) {
  const place = top.filter((one) => one.logprob > logprob).length;
  const isListed = place < N_CHOICES;
  const choice = isListed
    ? `the model's ${ORDINALS[place]} choice`
    : `not among the model's first ${N_CHOICES} choices`;
  const title = make(
    "p",
    {},
    make("code", {}, short(name)),
    make("span", { class: "quiet" }, ` ${choice}`),
  );
  const rows = top.map((one) => bar(one, one.name === name));
  if (!top.some((one) => one.name === name)) rows.push(bar({ name, logprob }, true));
  return make("div", {}, title, make("ol", {}, ...rows));
}

function bar({ name, logprob }, isChosen) {
  const share = Math.exp(logprob);
  const filled = make("span", { class: "share" });
  filled.style.width = `${share * 100}%`;
  const track = make("span", { class: "track" }, filled);
  return make(
    "li",
    { class: isChosen ? "chosen" : "" },
    make("code", {}, short(name)),
    track,
    formatShare(share),
  );
}
