// Matches a stream's text with its tokens.
//
// Text and tokens do not arrive together: a character may take several tokens, text that may begin
// a stop string is held back, and some tokens (such as the end of text) have no text. All of the
// text is placed, in order.

/** Splits a stream into pieces { text, tokens }: one token, or several that share a character. */
export class Placement {
  #tokens = [];
  #text = "";

  /** Take in an event, and return the pieces that are now certain. */
  push(text, tokens) {
    this.#tokens.push(...tokens);
    this.#text += text;
    const pieces = [];
    while (this.#tokens.length && this.#text && !this.#mayGrow()) pieces.push(this.#next());
    return pieces;
  }

  /** Return the remaining pieces at the end of the stream. */
  flush() {
    const pieces = this.#text ? [{ text: this.#text, tokens: this.#tokens }] : [];
    if (!this.#text) pieces.push(...this.#tokens.map((token) => ({ text: "", tokens: [token] })));
    this.#tokens = [];
    this.#text = "";
    return pieces;
  }

  /** Leave out the tokens that wait for their text: it is shown elsewhere. */
  skip() {
    this.#tokens = [];
  }

  /** Return whether the text only begins the next token, the rest of which is held back. */
  #mayGrow() {
    const { text } = this.#tokens[0];
    return text !== null && text.length > this.#text.length && text.startsWith(this.#text);
  }

  #next() {
    const { text } = this.#tokens[0];
    if (text !== null && this.#text.startsWith(text)) return this.#take(1, text.length);
    for (let n = 1; n < this.#tokens.length; n++) {
      const at = this.#tokens[n].text ? this.#text.indexOf(this.#tokens[n].text) : -1;
      if (at >= 0) return this.#take(n, at);
    }
    return this.#take(this.#tokens.length, this.#text.length);
  }

  #take(nTokens, nChars) {
    const piece = { text: this.#text.slice(0, nChars), tokens: this.#tokens.splice(0, nTokens) };
    this.#text = this.#text.slice(nChars);
    return piece;
  }
}
