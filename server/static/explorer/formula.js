// The attention formula, with the shapes and properties of one head of this model.

import { byId } from "../common/dom.js";
import { maskOf } from "./weights.js";

const UNROTATED = {
  rotary: "This layer does not rotate them by position.",
  learned: "Positions are learned vectors, added to X before the first layer.",
  sinusoidal: "Positions are sinusoids, added to X before the first layer.",
  none: "The model has no positions; only the mask tells it the order.",
  learned_relative: "Positions are learned vectors, added to X before the first layer.",
};

/** Fill in the formula for a text of n tokens. */
export function showFormula(card, layer, head, n) {
  const { config } = card;
  const facts = {
    layer,
    head,
    n,
    window: maskOf(config, layer).window,
    rotates: rotates(config, layer),
  };
  const [biased, capped] = [
    ["alibi", "relative", "learned_relative"].includes(config.position),
    config.attention_softcap !== null,
  ];
  const isUsual = !biased && !capped && config.attention_scale === null;
  const shown = {
    "#formula-usual": isUsual,
    "#formula-general": !isUsual,
    ".with-bias": biased,
    ".with-cap": capped,
  };
  for (const [selector, is] of Object.entries(shown)) {
    for (const element of document.querySelectorAll(selector))
      element.toggleAttribute("hidden", !is);
  }
  const texts = { ...shapes(config, n), ...descriptions(config, facts), ...scale(config, isUsual) };
  for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
  byId("formula-note").textContent = `${exportNote(isUsual)} ${precisionNote(card)}`;
}

function shapes({ d_model, head_dim }, n) {
  const [headShape, square] = [`${n} × ${head_dim}`, `${n} × ${n}`];
  return {
    "shape-x": `${n} × ${d_model}`,
    ...{ "shape-q": headShape, "shape-k": headShape, "shape-v": headShape, "shape-z": headShape },
    ...{ "shape-a": square, "shape-b": square, "shape-m": square },
  };
}

function descriptions(config, { layer, head, window, rotates }) {
  const { n_head: nHead, head_dim: headDim, d_model: dModel, attention_softcap: cap } = config;
  const about = [`Each of the ${nHead} heads has its own.`, positions(config, rotates, window)];
  if (config.qk_norm) {
    const where = config.qk_norm_across_heads ? "over all heads together" : "in each head";
    about.splice(1, 0, `RMSNorm follows ${where}, for Q and K.`);
  }
  return {
    "formula-layer": layer,
    "formula-head": head,
    "about-q": about.join(" "),
    "about-k": sharing(config, head),
    "about-c": `Soft cap: it keeps scores between −${cap} and ${cap}.`,
    "about-b": bias(config),
    "about-m": maskNote(config.causal, window),
    "about-v":
      nHead === config.n_kv_head
        ? "Each head has its own."
        : "Heads share values as they share keys.",
    "about-z": `The results of all ${nHead} heads together are ${nHead * headDim} numbers per token,
      which learned weights map to the layer's width of ${dModel}.`,
  };
}

function maskNote(causal, window) {
  if (causal)
    return window === null
      ? "0 where a token may attend, −∞ at all later tokens."
      : `0 at the ${window} tokens that a token sees in this layer, itself and those before it, −∞
        elsewhere.`;
  return window === null
    ? "0 everywhere: in an encoder each token sees all of them."
    : `0 at tokens less than ${window} positions away, −∞ elsewhere.`;
}

const rotates = (config, layer) =>
  config.position === "rotary" && !config.layers_without_rotary.includes(layer);

function positions(config, rotated, window) {
  if (rotated) {
    const { head_dim: width, rotary_dim: part } = config;
    const own = window === null ? null : config.sliding_window_rope_theta;
    const base = own ?? config.rope_theta;
    const which =
      (part ?? width) === width
        ? "Q and K are"
        : `The first ${part} numbers of each row of Q and K are`;
    return `${which} rotated by angles that grow with the position (rotary, base ${base}), so that
      scores depend on distance.`;
  }
  return UNROTATED[config.position] ?? "";
}

function sharing({ n_head: nHead, n_kv_head: nSets }, head) {
  if (nHead === nSets) return "Each head has its own.";
  if (nSets === 1) return `All ${nHead} heads share one set.`;
  const group = nHead / nSets;
  const first = head - (head % group);
  const which = `heads ${first} to ${first + group - 1} use set ${first / group}`;
  return `${nHead} heads share ${nSets} sets of keys, ${group} heads each: ${which}.`;
}

function scale({ attention_scale: modelScale, head_dim: width }, isUsual) {
  const usual = (width ** -0.5).toPrecision(4);
  if (isUsual)
    return {
      "symbol-s": "d",
      "about-s":
        `Width of a head, ${width}. The factor 1/√d = 1/√${width} ≈ ${usual} keeps ` +
        `scores from growing with it.`,
    };
  return {
    "symbol-s": "s",
    "about-s":
      modelScale === null
        ? `Scale 1/√d = 1/√${width} ≈ ${usual}: it keeps scores from growing with a head's width d.`
        : `Scale of this model, ${modelScale}, instead of 1/√d.`,
  };
}

function bias({ position, relative_buckets }) {
  return position === "alibi"
    ? "ALiBi: minus the distance to the key, times a slope per head. Distant tokens count less."
    : `Learned bias per head for each of ${relative_buckets} distance ranges, the same in all layers.`;
}

function exportNote(isUsual) {
  return isUsual
    ? "In the exported graph 1/√d is part of the weights of Q. Scaling leaves 0 and −∞ as they are."
    : "In the exported graph s is part of the weights of Q.";
}

function precisionNote({ precision: name }) {
  if (!name.startsWith("int")) return "";
  return `The weights of Q, K and V are ${name}. Softmax is computed in floats, as in prefill.`;
}
