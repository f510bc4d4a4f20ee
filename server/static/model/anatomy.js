// The steps of a model, derived from its configuration. They are drawn, and listed as text.

import { formatCount as n } from "../common/format.js";

const FEED_FORWARDS = {
  swiglu: "SwiGLU",
  geglu: "GEGLU",
  geglu_tanh: "GEGLU (tanh)",
  gelu: "GELU",
  gelu_tanh: "GELU (tanh)",
  relu: "ReLU",
  swiglu_clamped: "clamped SwiGLU",
};
const NORMS = { rmsnorm: "RMSNorm", layernorm: "LayerNorm" };
const MAX_NAMED_LAYERS = 4; // more layers are only counted

/** Return whether the feed-forward is gated (a GLU variant). */
export const isGated = (config) => config.feed_forward.includes("glu");

/** Return the number of layers whose feed-forward is a mixture of experts. */
export const mixturesOf = ({ n_experts: experts, n_layer: layers, dense_layers: dense }) =>
  experts === null ? 0 : layers - dense.length;

/** Return the width of the feed-forward, or of each expert. */
export const innerWidth = ({ d_expert: ofExpert, d_ff: inner }) => ofExpert ?? inner;

/** Return whether positions have learned vectors, or distances learned biases. */
export const hasLearnedPositions = ({ position }) => position.startsWith("learned");
export const hasRelativeBias = ({ position }) => position.endsWith("relative");

/**
 * Return the steps from tokens to logits, or to a vector of the text or its labels' scores. With an
 * encoder, those of the source come first.
 *
 * A step is { kind, title, notes }. A residual is { branches: [[step]] }, whose input is added to the
 * output of its branches. A repetition is { times, steps }.
 */
export function stepsOf(config) {
  const { encoder, pooling } = config;
  const last = pooling === null ? headSteps(config) : poolingSteps(config);
  if (encoder === null) return [...hiddenSteps(config, "Tokens"), ...last];
  const encoded = {
    kind: "value",
    title: "Encoded source",
    notes: [`${n(encoder.d_model)} numbers for each token, which all layers below read`],
  };
  const target = hiddenSteps(config, "Target");
  return [...hiddenSteps(encoder, "Source"), encoded, ...target, ...last];
}

function hiddenSteps(config, title) {
  return [
    {
      kind: "value",
      title,
      notes: [`up to ${n(config.max_model_len)} ids below ${n(config.vocab_size)}`],
    },
    { kind: "embedding", title: "Embedding", notes: embeddingNotes(config) },
    ...(config.embedding_norm ? [normStep(config)] : []),
    { times: config.n_layer, steps: blockSteps(config) },
    ...(config.norm_placement === "post" ? [] : [normStep(config)]),
  ];
}

function headSteps(config) {
  const notes = [`${n(config.vocab_size)} numbers, which softmax turns into probabilities`];
  return [
    { kind: "embedding", title: "Output head", notes: headNotes(config) },
    { kind: "value", title: "Logits", notes },
  ];
}

function poolingSteps({ d_model: width, pooling }) {
  const { kind, projections, normalize, labels } = pooling;
  const title = { cls: "First token", last: "Last token", mean: "Mean of all tokens" }[kind];
  const widths = [width, ...projections.map(({ d_out: out }) => out)];
  const dense = projections.map(({ activation, norm }, i) => ({
    kind: "embedding",
    title: "Projection",
    notes: [
      `${n(widths[i])} → ${n(widths[i + 1])}`,
      ...(activation === "identity" ? [] : [`then ${activation}`]),
      ...(norm ? ["then a norm"] : []),
    ],
  }));
  const out = n(widths.at(-1));
  const result = labels.length
    ? { kind: "value", title: "Scores", notes: [`of ${out} labels`] }
    : { kind: "value", title: "Vector", notes: [`${out} numbers${normalize ? ", of length 1" : ""}`] };
  return [{ kind: "norm", title, notes: [] }, ...dense, result];
}

function blockSteps(config) {
  const norm = normStep(config);
  const [attention, feedForward] = [attentionStep(config), feedForwardStep(config)];
  if (config.parallel_residual)
    return [
      {
        branches: [
          [norm, attention],
          [norm, feedForward],
        ],
      },
    ];
  const ofSource = config.encoder === null ? [] : [crossAttentionStep(config)];
  return [attention, ...ofSource, feedForward].flatMap((step) => {
    if (config.norm_placement === "post") return [{ branches: [[step]] }, norm];
    const before = config.norm_placement === "output" ? [] : [norm];
    const after = config.norm_placement === "pre" ? [] : [norm];
    return [{ branches: [[...before, step, ...after]] }];
  });
}

const normStep = (config) => ({ kind: "norm", title: NORMS[config.norm], notes: [] });

function embeddingNotes(config) {
  const { d_model: width, max_model_len: length, position } = config;
  const notes = [`${n(config.vocab_size)} tokens × ${n(width)} channels`];
  if (config.embedding_scale !== 1) notes.push(`times ${round(config.embedding_scale)}`);
  if (hasLearnedPositions(config))
    notes.push(`plus a learned vector for each of ${n(length)} positions`);
  if (position === "sinusoidal") notes.push(`times √${n(width)}, plus sinusoids of the position`);
  if (config.n_token_types !== null)
    notes.push(`plus a learned vector for each of ${n(config.n_token_types)} token types`);
  return notes;
}

function attentionStep(config) {
  const { n_head: heads, head_dim: channels, attention_scale: scale } = config;
  const notes = [
    `${n(heads)} query ${heads === 1 ? "head" : "heads"} of ${n(channels)} channels`,
    sharing(config),
    ...(config.causal ? [] : ["each token sees all tokens, later ones too"]),
    ...positionNotes(config),
    scale === null ? `scores / √${n(channels)}` : `scores × ${round(scale)}`,
  ];
  const normed = config.qk_norm_across_heads ? "all heads together" : "every head";
  if (config.qk_norm) notes.push(`RMSNorm on ${normed} of queries and keys`);
  if (config.attention_softcap !== null)
    notes.push(`scores capped at ±${round(config.attention_softcap)} by tanh`);
  if (config.sliding_window !== null) notes.push(windowNote(config));
  if (config.attention_sinks) notes.push("a learned score for each head that no key takes");
  const biased = [
    config.qkv_bias && "queries, keys and values",
    config.output_bias && "output",
  ].filter(Boolean);
  if (biased.length) notes.push(`biases on ${biased.join(" and ")}`);
  return { kind: "attention", title: `${sharingName(config)} attention`, notes };
}

function crossAttentionStep(config) {
  const { n_head: heads, head_dim: channels } = config;
  const notes = [
    `${n(heads)} query ${heads === 1 ? "head" : "heads"} of ${n(channels)} channels`,
    "keys and values of the encoded source, all of which each token sees",
  ];
  return { kind: "attention", title: "Cross-attention", notes };
}

function sharingName({ n_head: heads, n_kv_head: shared }) {
  if (heads === shared) return "Multi-head";
  return shared === 1 ? "Multi-query" : "Grouped-query";
}

function sharing({ n_head: heads, n_kv_head: shared }) {
  if (heads === shared) return "each with its own keys and values";
  return shared === 1
    ? "all sharing one key-value head"
    : `sharing ${n(shared)} key-value heads, ${n(heads / shared)} to each`;
}

function positionNotes(config) {
  if (config.position === "rotary") return [rotaryNote(config)];
  if (config.position === "alibi")
    return ["ALiBi: a penalty that grows with the distance, with one slope per head"];
  if (config.position === "none") return ["no positions: only the mask tells the order"];
  if (!hasRelativeBias(config)) return [];
  const [buckets, most] = [n(config.relative_buckets), n(config.relative_max_distance)];
  return [`a learned bias for each of ${buckets} buckets of distance, up to ${most}`];
}

function rotaryNote(config) {
  const { rotary_dim: turned, rope_scaling: scaling, layers_without_rotary: without } = config;
  const parts = [`rotary positions, θ = ${n(config.rope_theta)}`];
  if (turned !== null && turned < config.head_dim) parts.push(`on ${n(turned)} channels`);
  if (scaling !== null) parts.push(`scaled by ${scaling.kind}, factor ${round(scaling.factor)}`);
  if (config.sliding_window_rope_theta !== null)
    parts.push(`with windows θ = ${n(config.sliding_window_rope_theta)}, unscaled`);
  if (without.length) parts.push(`except ${layersNote(without, config)}`);
  return parts.join(", ");
}

function windowNote({ sliding_window: window, sliding_window_layers: layers, ...config }) {
  const where = layers === null ? "in all layers" : layersNote(layers, config);
  if (!config.causal) return `only tokens less than ${n(window)} positions away, ${where}`;
  return `sliding window of ${n(window)} tokens, the token itself included, ${where}`;
}

const layersNote = (layers, config) =>
  layers.length > MAX_NAMED_LAYERS
    ? `in ${n(layers.length)} of ${n(config.n_layer)} layers`
    : `in ${layers.length === 1 ? "layer" : "layers"} ${layers.join(", ")}`;

function feedForwardStep(config) {
  const width = n(config.d_model);
  const inner = isGated(config) ? `2 × ${n(innerWidth(config))}` : n(innerWidth(config));
  const notes = [`${FEED_FORWARDS[config.feed_forward]}: ${width} → ${inner} → ${width}`];
  if (config.feed_forward_bias) notes.push("with biases");
  if (config.n_experts === null) return { kind: "feed-forward", title: "Feed-forward", notes };
  const { n_experts: experts, n_experts_per_token: chosen, dense_layers: dense } = config;
  notes.unshift(`${n(experts)} experts, of which a router chooses ${n(chosen)} for each token`);
  if (dense.length) notes.push(`one of ${n(config.d_ff)} instead ${layersNote(dense, config)}`);
  return { kind: "feed-forward", title: "Mixture of experts", notes };
}

function headNotes(config) {
  const shape = `${n(config.d_model)} → ${n(config.vocab_size)}`;
  const notes = [
    `${shape}, with ${config.tied_embeddings ? "the embedding's weights" : "weights of its own"}`,
  ];
  if (config.head_bias) notes.push("with a bias");
  if (config.logit_softcap !== null)
    notes.push(`capped at ±${round(config.logit_softcap)} by tanh`);
  return notes;
}

const round = (value) =>
  Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
