// Readable forms of tokens.

import { make } from "./dom.js";

const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "→" };
// Control characters, marks that change the direction of text, and characters of zero width, except
// the joiners and variation selectors that scripts and emoji need.
const HIDDEN = /(?![\n\t]|(?<=[^\0-\x7f])[\u200c\u200d\ufe00-\ufe0f])[\p{Cc}\p{DI}\u2028\u2029]/gu;

const signOf = (character) =>
  SIGNS[character] ?? `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** Return a token with visible signs for whitespace and hidden characters. */
export const visible = (token) => token.replace(/[ \n\t]/g, signOf).replace(HIDDEN, signOf) || "∅";

/** Return a token in quotation marks, for use in a sentence. */
export const quoted = (token) => `‘${visible(token)}’`;

/**
 * Return a text as strings and elements. Each hidden character is in an element of its own, which
 * shows a sign for it and isolates its effect.
 */
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
