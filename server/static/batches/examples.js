// Requests to try a batch with, by the kind of the page's model.

import { kindOf } from "../common/models.js";

const TEXTS = ["Once upon a time", "The capital of France is", "There are three reasons why"];
const FEW = { max_tokens: 64 };
const KINDS = {
  chat: ["/v1/chat/completions", (text) => ({ messages: [{ role: "user", content: text }], ...FEW })],
  complete: ["/v1/completions", (prompt) => ({ prompt, ...FEW })],
  translate: ["/v1/completions", (prompt) => ({ prompt })],
  embed: ["/v1/embeddings", (input) => ({ input })],
  rank: ["/v1/rerank", (query) => ({ query, documents: TEXTS })],
  classify: ["/v1/classify", (input) => ({ input })],
};

/** Return the lines of a file of requests for a model. */
export function linesFor({ model, examples }) {
  const [url, bodyOf] = KINDS[kindOf(model)];
  return [...examples, ...TEXTS].slice(0, TEXTS.length).map((text, i) => {
    const body = { model, ...bodyOf(text) };
    return JSON.stringify({ custom_id: `${i + 1}`, method: "POST", url, body });
  });
}
