// The number of parameters of each part of a model, from its configuration.

import { attentionsOf, hasLearnedPositions, hasRelativeBias } from "./anatomy.js";
import { isGated, keyWidth, mixturesOf } from "./anatomy.js";

/** Return [[part, count]] of all parts that have parameters. */
export function parametersOf(config) {
  const parts = [
    ["Encoder", config.encoder === null ? 0 : encoder(config)],
    ["Embedding", config.vocab_size * config.d_model],
    ["Positions", positions(config)],
    ["Token types", (config.n_token_types ?? 0) * config.d_model],
    ["Attention", attentionsOf(config) * attention(config)],
    ["Recurrence", config.recurrent_layers.length * recurrence(config)],
    ["Cross-attention", config.n_layer * crossAttention(config)],
    ["Feed-forward", feedForwardsOf(config) * feedForward(config)],
    ["Experts", mixturesOf(config) * mixture(config)],
    ["Norms", norms(config)],
    ["Output head", config.pooling === null ? head(config) : 0],
    ["Projections", projections(config)],
  ];
  return parts.filter(([, count]) => count > 0);
}

const feedForwardsOf = (config) =>
  config.n_layer - config.layers_without_feed_forward.length - mixturesOf(config);

const head = ({ d_model: width, vocab_size: size, tied_embeddings: isTied, head_bias: isBiased }) =>
  (isTied ? 0 : width * size) + (isBiased ? size : 0);

/** Return the parameters of the encoder, without an embedding that it shares. */
function encoder({ encoder: config, shared_embedding: isShared }) {
  const parts = parametersOf({ ...config, tied_embeddings: true, head_bias: false });
  const counted = parts.filter(([part]) => !isShared || part !== "Embedding");
  return counted.reduce((sum, [, count]) => sum + count, 0);
}

function crossAttention({ encoder: read, n_head, n_kv_head, head_dim, ...config }) {
  if (read === null) return 0;
  const [own, shared] = [n_head * head_dim, 2 * n_kv_head * head_dim];
  const biases = (config.qkv_bias ? own + shared : 0) + (config.output_bias ? config.d_model : 0);
  return 2 * config.d_model * own + read.d_model * shared + biases;
}

function positions(config) {
  const learned = hasLearnedPositions(config) ? config.max_model_len * config.d_model : 0;
  return learned + (hasRelativeBias(config) ? config.relative_buckets * config.n_head : 0);
}

function projections({ pooling, head_projection: last, d_model, norm_bias: isBiased }) {
  let [sum, width] = [0, d_model];
  for (const { d_out: out, bias, norm } of pooling?.projections ?? (last ? [last] : [])) {
    sum += width * out + (bias ? out : 0) + (norm ? (isBiased ? 2 : 1) * out : 0);
    width = out;
  }
  return sum;
}

function attention({ d_model: width, n_head: heads, n_kv_head: shared, ...config }) {
  if (config.latents !== null) return latentAttention({ d_model: width, n_head: heads, ...config });
  const projected = (heads + 2 * shared) * config.head_dim;
  const biases = (config.qkv_bias ? projected : 0) + (config.output_bias ? width : 0);
  const sinks = config.attention_sinks ? heads : 0;
  const limits = config.qkv_clip === null ? 0 : projected;
  const gates = heads * (config.attention_gate_by_head ? 1 : config.head_dim);
  const gate = config.attention_gate ? gates * (width + (config.qkv_bias ? 1 : 0)) : 0;
  return width * projected + heads * config.head_dim * width + biases + sinks + limits + gate;
}

/** Return the parameters of a recurrent layer in attention's place. */
function recurrence({ recurrence: kind, d_model: width }) {
  if (kind === null) return 0;
  if (kind.kind === "short_convolution")
    return 4 * width * width + kind.kernel * width + (kind.bias ? 5 * width : 0);
  if (kind.kind === "mamba") return mamba(kind, width);
  if (kind.kind === "mamba2") return mamba2(kind, width);
  const { n_head: heads, n_key_head: shared, key_dim: ofKey, value_dim: ofValue, kernel } = kind;
  const [values, convolved] = [heads * ofValue, 2 * shared * ofKey + heads * ofValue];
  const decays = heads * (kind.decays_by_channel ? ofKey : 1);
  const rank = kind.rank ?? 0; // of what gates and decays are made of
  const read = convolved + (rank || values) + heads + (rank || decays);
  const made = rank * (values + decays);
  return width * (read + values) + made + kernel * convolved + heads + decays + ofValue;
}

function mamba({ d_inner: channels, d_state: kept, step_rank: rank, kernel, ...kind }, width) {
  const selected = rank + 2 * kept;
  const convolution = kernel + (kind.convolution_bias ? 1 : 0);
  const norms = kind.inner_norm_eps === null ? 0 : selected;
  const ends = 3 * width * channels + (kind.bias ? 2 * channels + width : 0);
  return ends + channels * (convolution + selected + rank + kept + 2) + norms;
}

function mamba2({ n_head: heads, n_group: groups, kernel, bias, ...kind }, width) {
  const values = heads * kind.head_dim;
  const convolved = values + 2 * groups * kind.d_state;
  const read = values + convolved + heads;
  const convolution = (kernel + (kind.convolution_bias ? 1 : 0)) * convolved;
  const norm = kind.normed ? values : 0;
  return width * (read + values) + (bias ? read + width : 0) + convolution + 3 * heads + norm;
}

/** Return the parameters of a layer's attention over latents, without their norms. */
function latentAttention({ d_model: width, n_head: heads, head_dim: kept, latents, ...config }) {
  const { rank, key_dim: ofKey, value_dim: ofValue, query_rank: ofQuery } = latents;
  const queries = (ofQuery ?? width) * heads * keyWidth({ latents, ...config });
  const made = heads * rank * (ofKey + ofValue);
  const lowered = heads * ofValue * width + (config.output_bias ? width : 0);
  const gate = config.attention_gate ? heads * width : 0;
  return width * (kept + (ofQuery ?? 0)) + queries + made + lowered + gate;
}

function feedForward({ d_model: width, d_ff: inner, feed_forward_bias: isBiased, ...config }) {
  const widened = isGated(config) ? 2 * inner : inner;
  const learned = config.feed_forward === "xielu" ? 2 : 0;
  return width * widened + inner * width + (isBiased ? widened + width : 0) + learned;
}

/** Return the parameters of all experts of a layer, and of their router. */
function mixture({ n_experts: experts, d_expert: inner, d_shared_expert: shared, ...config }) {
  const { feed_forward_bias: isBiased, choice_bias: choice, shared_expert_gate: isGate } = config;
  const router = config.d_model + (isBiased ? 1 : 0) + (choice === null ? 0 : 1);
  const common = shared === null ? 0 : feedForward({ ...config, d_ff: shared });
  const gate = isGate ? config.d_model : 0;
  return experts * (feedForward({ ...config, d_ff: inner }) + router) + common + gate;
}

function norms({ d_model: width, n_head: heads, n_kv_head: shared, ...config }) {
  const one = config.norm === "layernorm" && config.norm_bias ? 2 * width : width;
  const each = config.qk_norm_kind === "layernorm" && config.norm_bias ? 2 : 1;
  const { latents } = config;
  const ofLatents = latents === null ? 0 : latents.rank + (latents.query_rank ?? 0);
  const ofHeads = config.qk_norm ? each * (heads + shared) * config.head_dim : 0;
  const sublayers = config.encoder === null ? 2 : 3;
  const perLayer = (config.norm_placement === "both" ? 2 : 1) * sublayers * one;
  const attending = attentionsOf(config);
  const outside = (config.norm_placement === "post" ? 0 : 1) + (config.embedding_norm ? 1 : 0);
  const more = config.mixture_norm ? mixturesOf(config) : 0;
  const absent =
    config.layers_without_attention_norm.length + config.layers_without_feed_forward.length;
  const others = config.recurrence_beside_attention ? [] : config.recurrent_layers;
  const without = [...config.layers_without_qk_norm, ...others];
  const withHeads = config.n_layer - new Set(without).size;
  const ofAttention = attending * ofLatents + withHeads * ofHeads;
  return config.n_layer * perLayer + ofAttention + (outside + more - absent) * one;
}
