// Vectors of texts and of tokens, from POST /v1/embeddings, /tokenize and /embed_all.

import { postJson } from "../common/api.js";

/** Return the vector of each text, of length 1. */
export async function vectorsOf(model, texts, signal) {
  const body = { model, input: texts, encoding_format: "base64" };
  const { data } = await postJson("v1/embeddings", body, signal);
  return data.map(({ embedding }) => unit(decode(embedding)));
}

/** Return the tokens of each text, each as { name, vector }, its vector of length 1. */
export async function tokensOf(model, texts, signal) {
  const asked = texts.map((prompt) =>
    postJson("tokenize", { model, prompt, return_token_strs: true }, signal),
  );
  const tokenized = await Promise.all(asked);
  const inputs = tokenized.map(({ tokens }) => tokens);
  const vectors = await postJson("embed_all", { model, inputs }, signal);
  return tokenized.map(({ token_strs: names }, text) =>
    names.map((name, i) => ({ name, vector: unit(vectors[text][i]) })),
  );
}

/** Return the cosine of vectors of length 1. */
export const cosine = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

/** Return each token as { name, cosine, index, match }: the most similar of the others, and its name. */
export function bestMatches(tokens, others) {
  return tokens.map(({ name, vector }) => {
    const found = others.map((other) => cosine(vector, other.vector));
    const highest = Math.max(...found);
    const index = found.indexOf(highest);
    return { name, cosine: highest, index, match: others[index].name };
  });
}

/** Decode base64 of float32, little-endian. */
function decode(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

function unit(vector) {
  const length = Math.hypot(...vector) || 1;
  return Float32Array.from(vector, (value) => value / length);
}
