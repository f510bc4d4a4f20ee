// Explanations as the server gives them: one text's tokens at once, its heads' weights as they are looked at.

import { postJson } from "../shared/api.js";
import { pause } from "../shared/pause.js";
import { flatten } from "./weights.js";

const MAX_KEPT = 2 ** 24; // weights that the page keeps, 4 bytes each
const TOP_K = 10;
const TRIES = 5;

/** A text that the model has read: its tokens, what may come next, and the weights that have come so far. */
export class Reading {
  constructor(text, answer) {
    this.text = text;
    this.tokens = answer.tokens;
    this.ids = answer.token_ids;
    this.nextTokens = answer.next_tokens;
    this.maps = new Map();
    this.keep(answer.attention);
  }

  get n() {
    return this.tokens.length;
  }

  /** A head's n² weights, or undefined while they have not come. */
  weights(layer, head) {
    return this.maps.get(`${layer}.${head}`);
  }

  keep(attention) {
    for (const { layer, head, weights } of attention)
      this.maps.set(`${layer}.${head}`, flatten(weights));
    const most = Math.max(attention.length, Math.floor(MAX_KEPT / this.n ** 2));
    for (const oldest of [...this.maps.keys()].slice(0, -most)) this.maps.delete(oldest);
  }
}

/** Let the model read a text. One head comes with it: how many fit in an answer is known when the tokens are. */
export async function read(text, layer, head, options) {
  return new Reading(
    text,
    await explain({ text, layers: [layer], heads: [head], top_k: TOP_K }, options),
  );
}

/** Get the heads of layers that have not come yet, in answers within the server's limits; `onarrival` after each. */
export async function complete(reading, layers, heads, options, onarrival) {
  const lacking = layers.filter((layer) => heads.some((head) => !reading.weights(layer, head)));
  for (const wish of pieces(lacking, heads, options.limits.max_weights / reading.n ** 2)) {
    reading.keep((await explain({ text: reading.text, top_k: 0, ...wish }, options)).attention);
    onarrival();
  }
}

/** Layers and heads in pieces of at most so many maps. */
function* pieces(layers, heads, room) {
  const [nLayers, nHeads] = [
    Math.max(1, Math.floor(room / heads.length)),
    Math.min(Math.floor(room), heads.length),
  ];
  for (let i = 0; i < layers.length; i += nLayers) {
    for (let j = 0; j < heads.length; j += nHeads) {
      yield { layers: layers.slice(i, i + nLayers), heads: heads.slice(j, j + nHeads) };
    }
  }
}

/** POST /explain; where others are before it, again when the server says. */
async function explain(body, { signal, onwait }) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await postJson("explain", body, signal);
    } catch (error) {
      if (error.status !== 429 || attempt === TRIES) throw error;
      onwait(error);
      await pause(1000 * (error.retryAfter ?? 1), signal);
    }
  }
}
