// Tokens as people can read them.

import { make } from "./dom.js";

const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "→" };
// Controls, marks that turn a text round, what has no width; but no joiners and variants that scripts and emoji need.
const HIDDEN = /(?![\n\t]|(?<=[^\0-\x7f])[\u200c\u200d\ufe00-\ufe0f])[\p{Cc}\p{DI}\u2028\u2029]/gu;

const signOf = (character) =>
  SIGNS[character] ?? `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** A token with its whitespace, and all that would not be seen, made visible. */
export const visible = (token) => token.replace(/[ \n\t]/g, signOf).replace(HIDDEN, signOf) || "∅";

/** A token in a sentence. */
export const quoted = (token) => `‘${visible(token)}’`;

/** A text in strings and elements: what would not be seen in it has a sign before it, and acts on nothing else. */
export function revealed(text) {
  const parts = [];
  let end = 0;
  for (const { 0: character, index } of text.matchAll(HIDDEN)) {
    const sign = make("span", { class: "hidden-sign", "data-sign": signOf(character) }, character);
    parts.push(text.slice(end, index), sign);
    end = index + character.length;
  }
  return [...parts, text.slice(end)];
}
