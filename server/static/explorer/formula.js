// The attention formula, with the shapes and properties of one head of this model.

import { byId, present } from "../common/dom.js";
import { attends, keyWidth, memoryOf } from "../model/anatomy.js";
import { maskOf } from "./weights.js";

/** Fill in the formula for a text of n tokens. */
export function showFormula({ config, precision }, layer, head, n) {
  const isRecurrent = !attends(config, layer);
  byId("recurrence-formula").hidden = !isRecurrent;
  byId("formula").hidden = byId("symbols").parentElement.hidden = isRecurrent;
  const { kind } = config.recurrence ?? {};
  if (isRecurrent)
    return present(byId("recurrence-formula"), { ...memoryOf(config), kind, layer, head });
  const { position, head_dim: width, latents, attention_softcap: cap } = config;
  const scale = config.attention_scale ?? (latents && keyWidth(config) ** -0.5);
  const { window } = maskOf(config, layer);
  const biased = ["alibi", "relative", "learned_relative"].includes(position);
  const group = config.n_head / config.n_kv_head; // heads that share keys and values
  const set = Math.floor(head / group);
  const facts = {
    ...{ ...config, layer, head, n, window, precision, biased, cap, group, set },
    scale: scale && `${scale}`,
    usual: !biased && cap === null && scale === null,
    usual_scale: (width ** -0.5).toPrecision(4),
    learns_positions: position.startsWith("learned"),
    rotates: position === "rotary" && !config.layers_without_rotary.includes(layer),
    rotary_dim: config.rotary_dim === width ? null : config.rotary_dim,
    rope_theta: (window && config.sliding_window_rope_theta) ?? config.rope_theta,
    shared: group > 1,
    one_set: group > 1 && config.n_kv_head === 1,
    first: set * group,
    last: (set + 1) * group - 1,
    together: config.n_head * width,
    quantized: precision.startsWith("int"),
  };
  present(byId("formula"), facts);
  present(byId("symbols"), facts);
}
