// Tokens as people can read them.

const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "→" };

/** A token with its whitespace made visible. */
export const visible = (token) => token.replace(/[ \n\r\t]/g, (space) => SIGNS[space]) || "∅";

/** A token in a sentence. */
export const quoted = (token) => `‘${visible(token)}’`;
