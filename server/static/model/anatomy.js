// The steps of a model, derived from its configuration. They are drawn, and listed as text.

import { byId, present } from "../common/dom.js";
import { formatCount } from "../common/format.js";

const FEED_FORWARDS = {
  swiglu: "SwiGLU",
  geglu: "GEGLU",
  geglu_tanh: "GEGLU (tanh)",
  gelu: "GELU",
  gelu_tanh: "GELU (tanh)",
  relu: "ReLU",
  relu2: "squared ReLU",
  silu: "SiLU",
  xielu: "xIELU",
  swiglu_clamped: "clamped SwiGLU",
};
const RECURRENCES = {
  short_convolution: "Short convolution",
  delta_rule: "Gated delta rule",
  mamba: "Mamba",
  mamba2: "Mamba-2",
  lstm: "LSTM",
};
const NORMS = { rmsnorm: "RMSNorm", layernorm: "LayerNorm" };
const MAX_NAMED_LAYERS = 4; // more layers are only counted

/** Return whether the feed-forward is gated (a GLU variant). */
export const isGated = (config) => config.feed_forward.includes("glu");

/** Return the number of layers whose feed-forward is a mixture of experts. */
export const mixturesOf = ({ n_experts: experts, n_layer: layers, ...config }) =>
  experts === null
    ? 0
    : layers - new Set([...config.dense_layers, ...config.layers_without_feed_forward]).size;

/** Return the width of the feed-forward, or of each expert. */
export const innerWidth = ({ d_expert: ofExpert, d_ff: inner }) => ofExpert ?? inner;

/** Return the numbers of a key that a query is multiplied by, before latents take their place. */
export const keyWidth = ({ head_dim: width, latents, rotary_dim: turned }) =>
  latents === null ? width : latents.key_dim + turned;

/** Return whether a layer has attention, and the number of those that have. */
export const attends = ({ recurrent_layers: recurrent, ...config }, layer) =>
  config.recurrence_beside_attention || !recurrent.includes(layer);
export const attentionsOf = ({ n_layer: layers, recurrent_layers: recurrent, ...config }) =>
  config.recurrence_beside_attention ? layers : layers - recurrent.length;

/**
 * Return the number of a layer's heads; those of a recurrent layer have a matrix each, or attend to
 * the source alone.
 */
export const headsOf = (config, layer) =>
  !attends(config, layer) && config.cross_attention !== "additive"
    ? memoryOf(config).matrices
    : config.n_head;

/** Return whether positions have learned vectors, or distances learned biases. */
export const hasLearnedPositions = ({ position }) => position.startsWith("learned");
export const hasRelativeBias = ({ position }) => position.endsWith("relative");

/**
 * Return the steps from tokens to logits, or to a vector of the text or its labels' scores. With an
 * encoder, those of the source come first.
 *
 * A step is { kind, title, notes }. A residual is { branches: [[step]] }, whose input is added to the
 * output of its branches. A repetition is { caption, steps }.
 */
export function stepsOf(config) {
  const { encoder, pooling } = config;
  const last = pooling === null ? headSteps(config) : poolingSteps(config);
  if (encoder === null) return [...hiddenSteps(config, "Tokens"), ...last];
  const source = [...hiddenSteps(encoder, "Source"), step("encoded", encoder)];
  return [...source, ...hiddenSteps(config, "Target"), ...last];
}

/** Return the step that #steps describes for this configuration. */
function step(name, config, more) {
  const described = byId("steps").content.querySelector(`[data-step="${name}"]`).cloneNode(true);
  present(described, { ...factsOf(config), ...more });
  for (const hidden of described.querySelectorAll("[hidden]")) hidden.remove();
  const texts = [...described.children].map((one) => one.textContent.replace(/\s+/g, " ").trim());
  return { kind: described.className, title: texts[0], notes: texts.slice(1) };
}

function hiddenSteps(config, title) {
  return [
    step("tokens", config, { title }),
    step("embedding", config),
    ...(config.embedding_norm ? [normStep(config)] : []),
    ...repetition(layersOf(config), config),
    ...(config.norm_placement === "post" ? [] : [normStep(config)]),
  ];
}

function headSteps(config) {
  const { head_projection: projection, d_model: d_in } = config;
  const before = projection ? [step("projection", config, { ...projection, d_in })] : [];
  return [...before, step("head", config), step("logits", config)];
}

function poolingSteps(config) {
  const { projections, labels } = config.pooling;
  let width = config.d_model;
  const dense = projections.map((projection) => {
    const d_in = width;
    width = projection.d_out;
    return step("projection", config, { ...projection, d_in });
  });
  const result = step(labels.length ? "scores" : "vector", config, { ...config.pooling, width });
  return [step("pooling", config, config.pooling), ...dense, result];
}

/** Return each layer's mixers, which are names of steps, and whether it has a feed-forward. */
function layersOf(config) {
  return Array.from({ length: config.n_layer }, (_, layer) => ({
    mixers: [
      ...(attends(config, layer) ? ["attention"] : []),
      ...(config.recurrent_layers.includes(layer) ? ["recurrence"] : []),
    ],
    isFed: !config.layers_without_feed_forward.includes(layer),
  }));
}

/**
 * Return layers as the shortest sequence that repeats, in which equal neighbours repeat too. If it
 * occurs once, its parts say which layers they are.
 */
function repetition(layers, config) {
  const names = layers.map((layer) => JSON.stringify(layer));
  const repeats = (length) =>
    layers.length % length === 0 && names.every((name, i) => name === names[i % length]);
  const length = layers.findIndex((_, i) => repeats(i + 1)) + 1;
  const runs = [];
  for (let i = 0; i < length; i++) {
    if (names[i] !== names[i - 1] || i === 0)
      runs.push({ first: i, times: 0, steps: blockSteps(config, layers[i]) });
    runs.at(-1).times += 1;
  }
  const caption = (count, one) => `× ${formatCount(count)} ${count === 1 ? one : `${one}s`}`;
  const isOnce = length === layers.length && runs.length > 1;
  const parts = runs.map(({ first, times, steps }) => {
    const count = runs.length === 1 ? layers.length : times;
    const named = times === 1 ? `layer ${first}` : `layers ${first} to ${first + times - 1}`;
    return { caption: isOnce ? named : caption(count, "layer"), steps };
  });
  if (isOnce || runs.length === 1) return parts;
  return [{ caption: caption(layers.length / length, "time"), steps: parts }];
}

function blockSteps(config, { mixers, isFed }) {
  const [norm, feedForward] = [normStep(config), step("feed-forward", config)];
  const mixed = mixers.map((mixer) => step(mixer, config));
  if (config.parallel_residual)
    return [{ branches: [...mixed, feedForward].map((one) => [norm, one]) }];
  const readsSource = config.encoder !== null && config.cross_attention !== "none";
  const ofSource = readsSource ? [[step("cross-attention", config)]] : [];
  return [mixed, ...ofSource, ...(isFed ? [[feedForward]] : [])].flatMap((branches) => {
    if (config.norm_placement === "post") return [{ branches: branches.map((one) => [one]) }, norm];
    const isRecurrent =
      config.norm_placement === "output_of_attention" && mixers.includes("recurrence");
    const placement = isRecurrent ? "pre" : config.norm_placement;
    const before = placement.startsWith("output") ? [] : [norm];
    const after = placement === "pre" ? [] : [norm];
    return [{ branches: branches.map((one) => [...before, one, ...after]) }];
  });
}

const normStep = (config) => step("norm", config, { title: NORMS[config.norm] });

function factsOf(config) {
  const { n_head: heads, n_kv_head: shared, rope_scaling: scaling, dense_layers: dense } = config;
  const { layers_without_rotary: unturned, sliding_window_layers: windowed, latents } = config;
  return {
    ...config,
    scales: config.embedding_scale !== 1,
    embedding_factor: rounded(config.embedding_scale),
    learns_positions: hasLearnedPositions(config),
    learns_biases: hasRelativeBias(config),
    ...latents,
    own: latents === null && heads === shared,
    one_set: latents === null && heads !== shared && shared === 1,
    grouped: latents === null && heads !== shared && shared !== 1,
    heads: heads === 1 ? "head" : "heads",
    group: heads / shared,
    key_width: keyWidth(config),
    head_norm: NORMS[config.qk_norm_kind],
    turned: config.rotary_dim < config.head_dim ? config.rotary_dim : null,
    scaling: scaling && `${scaling.kind}, factor ${rounded(scaling.factor)}`,
    unturned: unturned.length ? layersNote(unturned, config) : "",
    factor: rounded(config.attention_scale),
    cap: rounded(config.attention_softcap),
    windowed: windowed === null ? "in all layers" : layersNote(windowed, config),
    activation: FEED_FORWARDS[config.feed_forward],
    gated: isGated(config),
    in_groups: config.n_groups_per_token < config.n_expert_groups,
    inner: innerWidth(config),
    dense: dense.length ? layersNote(dense, config) : "",
    ...memoryOf(config),
    logit_cap: rounded(config.logit_softcap),
  };
}

/**
 * Return what a recurrent layer keeps: matrices [rows, columns], or numbers of channels, and tokens
 * of a convolution.
 */
export function memoryOf({ recurrence: kind, d_model: width }) {
  if (kind === null) return {};
  const { n_head: matrices = 0, n_key_head: shared = 0, n_group: groups = 0, kernel } = kind;
  const { d_inner: channels = 0 } = kind;
  const [rows, columns] = [kind.key_dim ?? kind.d_state ?? 0, kind.value_dim ?? kind.head_dim ?? 0];
  const convolved = matrices ? matrices * columns + 2 * (shared || groups) * rows : channels || width;
  const { width: cells, both_ways: both } = kind; // of an LSTM, which has no convolution
  const kept = channels * rows + matrices * rows * columns;
  const numbers = cells ? 2 * cells : kept + (kernel - 1) * convolved;
  const shape = { matrices, rows, columns, channels, convolved, numbers, kernel, cells, both };
  return { ...shape, by_row: kind.decays_by_channel, mixer: RECURRENCES[kind.kind] };
}

const layersNote = (layers, config) =>
  layers.length > MAX_NAMED_LAYERS
    ? `in ${layers.length} of ${config.n_layer} layers`
    : `in ${layers.length === 1 ? "layer" : "layers"} ${layers.join(", ")}`;

const rounded = (value) =>
  value?.toLocaleString("en", { maximumSignificantDigits: 4 }) ?? null;
