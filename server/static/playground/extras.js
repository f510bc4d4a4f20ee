// The parts of a chat's answer beside its content: the reasoning, folded, and the tool calls.

import { clone } from "../common/dom.js";

/** Return a tool call as a card. */
export function callCard({ function: { name, arguments: text } }) {
  return clone("call-template", { name, arguments: indented(text) });
}

/** Indent JSON; other text, such as half a call, stays as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class ReasoningAndCalls {
  calls = [];

  /** Shows the reasoning in a `details` element with a `p`, and the calls in another element. */
  constructor(details, cards) {
    this.details = details;
    this.text = details.querySelector("p");
    this.cards = cards;
  }

  get reasoning() {
    return this.text.textContent;
  }

  /** Add those of an event. Return whether there are any. */
  add({ reasoning = "", calls = [] }) {
    this.text.append(reasoning);
    if (reasoning) this.details.hidden = false;
    for (const { index, id, function: part } of calls) {
      this.calls[index] ??= { id, type: "function", function: { name: part.name, arguments: "" } };
      this.calls[index].function.arguments += part.arguments ?? "";
    }
    if (calls.length) this.cards.replaceChildren(...this.calls.map(callCard));
    return reasoning !== "" || calls.length > 0;
  }

  show({ reasoning = "", calls = [] }) {
    this.calls = calls;
    this.details.hidden = reasoning === "";
    this.text.textContent = reasoning;
    this.cards.replaceChildren(...calls.map(callCard));
  }
}
