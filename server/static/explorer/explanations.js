// Explanations from POST /explain: first the tokens of a text, then attention weights as they are
// needed.

import { postJson } from "../common/api.js";
import { attends } from "../model/anatomy.js";
import { pause } from "../common/pause.js";
import { flatten } from "./weights.js";

const MAX_WEIGHTS = 2 ** 24; // kept in memory, 4 bytes each
const TOP_K = 10;
const LENS = 3; // tokens of each layer
const MAX_ATTEMPTS = 5;

/**
 * An explained text: its tokens, the likeliest next tokens, and the attention weights fetched so
 * far, of a model without some heads.
 */
class Explanation {
  constructor(text, without, response) {
    Object.assign(this, { text, without });
    this.tokens = response.tokens;
    this.ids = response.token_ids;
    this.nextTokens = response.next_tokens;
    this.sourceTokens = response.source_tokens ?? []; // an encoder-decoder's; tokens: its target's
    this.maps = new Map();
    this.behaviours = new Map(); // { behaviour, shares }, of all heads that were ever fetched
    this.alignments = new Map();
    this.readings = new Map(); // of recurrent heads, whose maps are decays
    this.reads = false; // whether readings are shown instead
    this.store(response);
  }

  /** Return the number of weights of a head. */
  get perHead() {
    return this.n * (this.n + this.sourceTokens.length);
  }

  get n() {
    return this.tokens.length;
  }

  /** Return a head's n² weights, or undefined if they have not been fetched. */
  weights(layer, head) {
    const name = `${layer}.${head}`;
    return (this.reads && this.readings.get(name)) || this.maps.get(name);
  }

  /** Return the largest of a head's weights by size, or 1 where none can be larger. */
  most(layer, head) {
    const readings = this.reads && this.readings.get(`${layer}.${head}`);
    return readings ? readings.reduce((most, one) => Math.max(most, Math.abs(one)), 1e-9) : 1;
  }

  /** Return a head's rows of weights over the source, or undefined. */
  alignment(layer, head) {
    return this.alignments.get(`${layer}.${head}`);
  }

  /** Store the weights of heads. Drop the oldest if there are too many. */
  store({ attention, source_attention: ofSource = [], memory = [] }) {
    for (const { layer, head, weights, ...behaviour } of attention) {
      this.maps.set(`${layer}.${head}`, flatten(weights));
      this.behaviours.set(`${layer}.${head}`, behaviour);
    }
    for (const { layer, head, decays, weights } of memory) {
      this.maps.set(`${layer}.${head}`, flatten(decays));
      this.readings.set(`${layer}.${head}`, flatten(weights));
    }
    for (const { layer, head, weights } of ofSource)
      this.alignments.set(`${layer}.${head}`, weights);
    const n = attention.length + memory.length;
    const most = Math.max(n, Math.floor(MAX_WEIGHTS / this.perHead));
    for (const oldest of [...this.maps.keys()].slice(0, -most)) {
      this.maps.delete(oldest);
      this.alignments.delete(oldest);
      this.readings.delete(oldest);
    }
  }
}

/** Return the fields of a request that say which heads are switched off: ["1.0", …]. */
function switchedOff(without) {
  const heads = without.map((name) => name.split(".").map(Number));
  return without.length ? { without: heads.map(([layer, head]) => ({ layer, head })) } : {};
}

/** Explain a text, with one head: the number of tokens decides how many fit in a response. */
export async function explainText(text, without, layer, head, options) {
  const body = { text, layers: [layer], heads: [head], top_k: TOP_K, ...switchedOff(without) };
  return new Explanation(text, without, await explain(body, options));
}

/**
 * Ask about one row of a head: the effect of the heads that are off, each layer's tokens, all heads'
 * entropies, and the head's values, unless they are known or too many for a response.
 */
export function explainRow(explanation, { layer, head, row, hasValues }, options) {
  const [{ text, n, without }, { config }] = [explanation, options];
  const fits = n * (2 * n + 3 * config.head_dim) <= options.limits.max_weights;
  const ofDecoder = { position: row, lens: LENS, entropies: true };
  return explain(
    {
      ...{ text, layers: [layer], heads: [], top_k: TOP_K, ...switchedOff(without) },
      ...(config.pooling === null ? ofDecoder : {}),
      ...(fits && !hasValues ? { head_values: { layer, head } } : {}),
    },
    options,
  );
}

/** Fetch missing heads of layers of one kind within the server's limits. Call `onarrival` after each part. */
export async function fetchMissing(explanation, layers, heads, options, onarrival) {
  const isKnown = (...place) => explanation.weights(...place) ?? explanation.alignment(...place);
  const missing = layers.filter((layer) => heads.some((head) => !isKnown(layer, head)));
  const hasTwo = !attends(options.config, layers[0]);
  const each = explanation.perHead * (hasTwo ? 2 : 1);
  for (const part of split(missing, heads, options.limits.max_weights / each)) {
    const { text, without } = explanation;
    explanation.store(await explain({ text, top_k: 0, ...switchedOff(without), ...part }, options));
    onarrival();
  }
}

/** Split layers and heads into parts of at most `room` maps. */
function* split(layers, heads, room) {
  const nLayers = Math.max(1, Math.floor(room / heads.length));
  const nHeads = Math.min(Math.floor(room), heads.length);
  for (let i = 0; i < layers.length; i += nLayers)
    for (let j = 0; j < heads.length; j += nHeads)
      yield { layers: layers.slice(i, i + nLayers), heads: heads.slice(j, j + nHeads) };
}

/** Send POST /explain. After a 429, retry when the server says. */
async function explain(body, { signal, onwait, model }) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await postJson("explain", { model, ...body }, signal);
    } catch (error) {
      if (error.status !== 429 || attempt === MAX_ATTEMPTS) throw error;
      onwait(error);
      await pause(1000 * (error.retryAfter ?? 1), signal);
    }
  }
}
