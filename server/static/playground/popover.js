// What the model thought of a token: its probability, and those of its likeliest rivals. One popover for all outputs.

import { byId, make } from "../shared/dom.js";
import { formatShare } from "../shared/format.js";
import { visible } from "../shared/token_text.js";

const ORDINALS = ["first", "second", "third", "fourth", "fifth"];
export const N_CHOICES = ORDINALS.length; // the likeliest tokens that are asked for, at each place
const GAP = 6; // pixels between a token and its popover

/** A token's name on one short line: indentation is counted. */
const short = (name) => visible(name).replace(/·{4,}/g, ({ length }) => `·×${length}`);

/** Show what is known of a piece of text beside its element. */
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

export function hide(element) {
  byId("token-popover").hidden = true;
  element?.removeAttribute("aria-describedby");
}

function about({ text, tokens }) {
  const blocks = tokens.map(aboutToken);
  if (tokens.length > 1)
    blocks.unshift(make("p", {}, `${tokens.length} tokens make ${short(text)}`));
  else if (text === "")
    blocks.push(make("p", { class: "quiet" }, "Not in the text: it ended it, or is special."));
  return blocks;
}

function aboutToken({ name, logprob, top }) {
  const place = top.filter((one) => one.logprob > logprob).length;
  const isAmongThem = place < N_CHOICES;
  const choice = isAmongThem
    ? `the model's ${ORDINALS[place]} choice`
    : `beyond its first ${N_CHOICES} choices`;
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
