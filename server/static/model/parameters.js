// The number of parameters of each part of a decoder, from its configuration.

import { isGated, mixturesOf } from "./anatomy.js";

/** Return [[part, count]] of all parts that have parameters. */
export function parametersOf(config) {
  const parts = [
    ["Embedding", config.vocab_size * config.d_model],
    ["Positions", positions(config)],
    ["Attention", config.n_layer * attention(config)],
    ["Feed-forward", (config.n_layer - mixturesOf(config)) * feedForward(config)],
    ["Experts", mixturesOf(config) * mixture(config)],
    ["Norms", norms(config)],
    ["Output head", config.tied_embeddings ? 0 : head(config)],
  ];
  return parts.filter(([, count]) => count > 0);
}

const head = ({ d_model: width, vocab_size: size, head_bias: isBiased }) =>
  width * size + (isBiased ? size : 0);

function positions({
  position,
  max_model_len: length,
  d_model: width,
  relative_buckets: buckets,
  n_head: heads,
}) {
  if (position === "learned") return length * width;
  return position === "relative" ? buckets * heads : 0;
}

function attention({
  d_model: width,
  n_head: heads,
  n_kv_head: shared,
  head_dim: channels,
  ...config
}) {
  const projected = (heads + 2 * shared) * channels;
  const biases = (config.qkv_bias ? projected : 0) + (config.output_bias ? width : 0);
  const sinks = config.attention_sinks ? heads : 0;
  return width * projected + heads * channels * width + biases + sinks;
}

function feedForward({ d_model: width, d_ff: inner, feed_forward_bias: isBiased, ...config }) {
  const widened = isGated(config) ? 2 * inner : inner;
  return width * widened + inner * width + (isBiased ? widened + width : 0);
}

/** Return the parameters of all experts of a layer, and of their router. */
function mixture({ n_experts: experts, d_expert: inner, ...config }) {
  const router = config.d_model + (config.feed_forward_bias ? 1 : 0);
  return experts * (feedForward({ ...config, d_ff: inner }) + router);
}

function norms({
  d_model: width,
  n_head: heads,
  n_kv_head: shared,
  head_dim: channels,
  ...config
}) {
  const one = config.norm === "layernorm" ? 2 * width : width;
  const ofHeads = config.qk_norm ? (heads + shared) * channels : 0;
  const perLayer = (config.norm_placement === "both" ? 4 : 2) * one + ofHeads;
  const outside = (config.norm_placement === "post" ? 0 : 1) + (config.embedding_norm ? 1 : 0);
  return config.n_layer * perLayer + outside * one;
}
