// The model card: the served model as a drawing and in figures, from GET /model.

import { attentionsOf } from "./anatomy.js";
import { drawArchitecture } from "./architecture.js";
import { copyText } from "../common/copying.js";
import { byId, clone, make, present } from "../common/dom.js";
import { formatBytes, formatCompact, formatCount, formatShare } from "../common/format.js";
import { pathOf } from "../common/models.js";
import { parametersOf } from "./parameters.js";

export function start(card) {
  byId("architecture").append(drawArchitecture(card.config));
  present(byId("model"), {
    ...generalFacts(card),
    ...memoryFacts(card),
    ...verificationFacts(card.verification),
  });
  showParameters(card);
  showFiles(card.files);
  showPairs("model-generation", card.generation, "None. The API's defaults apply.");
  showPairs("model-source", card.source, "Unknown.");
  showPairs("model-versions", card.versions, "Unknown.");
  byId("model-json").href = pathOf("model", card.model);
  byId("hashes-copy").addEventListener("click", async () => {
    byId("hashes-copied").textContent = await copyText(byId("hashes"));
  });
}

function generalFacts(card) {
  const { encoder, pooling } = card.config;
  const sizes = card.files.map((file) => file.bytes);
  const size = sizes.reduce((sum, bytes) => sum + (bytes ?? 0), 0);
  const note = sizes.includes(null) ? ", without files that are no longer there" : "";
  const labels = pooling?.labels.length;
  return {
    ...card.config,
    ...card,
    name: card.model,
    compact: formatCompact(card.parameters),
    encoder_layers: encoder?.n_layer,
    labels: labels === 1 ? "a label" : labels && `${labels} labels`,
    size: `${formatBytes(size)} (${formatCount(size)} bytes${note})`,
  };
}

function memoryFacts({ config, kv_cache: cache, max_source_len: source, max_model_len: target }) {
  if (cache === null) {
    const none = { prompt: "–", state: "", sequence: "–", budget: "–" };
    return { token: "not known until the model is loaded", ...none };
  }
  const { n_kv_head: heads, head_dim: channels, latents } = config;
  const recurrent = config.recurrent_layers.length;
  const layers = attentionsOf(config);
  const { bytes_per_token: bytes, prompt_bytes_per_token: more, budget_tokens: budget } = cache;
  const { state_bytes_per_sequence: state } = cache;
  const length = target + (source ?? 0);
  const each = bytes / ((latents ? 1 : 2) * layers * heads * channels);
  const others = config.position === "none" ? "beside it" : "turned";
  const parts = latents
    ? `${layers} layers × (${latents.rank} of the latent + ${channels - latents.rank} ${others})`
    : `2 × ${layers} layers × ${heads} ${heads === 1 ? "head" : "heads"} × ${channels} channels`;
  return {
    token: layers
      ? `${formatBytes(bytes)} = ${parts} × ${formatCount(each)} ${each === 1 ? "byte" : "bytes"}`
      : "nothing: no layer has keys and values",
    prompt: more
      ? `${formatBytes(more)} more, as 32-bit floats, until the prompt is complete`
      : "same as other tokens",
    state: state && `${formatBytes(state)} for any number of tokens, in ${recurrent} layers`,
    sequence: `${formatBytes(bytes * length + state)} for ${formatCount(length)} tokens`,
    budget: `${formatBytes(bytes * budget)}: ${formatCount(budget)} tokens of all sequences`,
  };
}

function verificationFacts(verification) {
  const { perplexity_torch: before, perplexity_onnx: after, text } = verification;
  const orNone = (value, format) => (value === null ? "not measured" : format(value));
  const change = before
    ? ` (${formatShare(Math.abs(after / before - 1))} ${after < before ? "lower" : "higher"})`
    : "";
  return {
    error: orNone(verification.max_logit_error, (value) => value.toPrecision(3)),
    agreement: orNone(verification.greedy_agreement, formatShare),
    "perplexity-torch": orNone(before, (value) => value.toFixed(3)),
    "perplexity-onnx": orNone(after, (value) => value.toFixed(3) + change),
    verdict: verification.verdict ?? null,
    "mean-cosine": orNone(verification.mean_cosine, (value) => value.toFixed(5)),
    text,
  };
}

function showParameters({ config, parameters }) {
  const parts = parametersOf(config);
  const sum = parts.reduce((total, [, count]) => total + count, 0);
  const rows = parts.map(([name, count]) =>
    clone("part-row", {
      name,
      count: formatCount(count),
      share: formatShare(count / sum),
      bar: [{ style: { width: `${(100 * count) / sum}%` } }],
    }),
  );
  byId("parameters-parts").append(...rows);
  byId("parameters-sum").textContent = formatCount(sum);
  byId("parameters-differ").hidden = sum === parameters;
  byId("parameters-manifest").textContent = formatCount(parameters);
}

function showFiles(files) {
  const rows = files.map(({ name, bytes }) => {
    const isGone = bytes === null;
    const title = isGone ? "" : `${formatCount(bytes)} bytes`;
    return clone("file-row", {
      name,
      size: [{ title }, isGone ? "no longer there" : formatBytes(bytes)],
    });
  });
  byId("files-list").append(...rows);
  byId("hashes").textContent = files.map(({ name, sha256 }) => `${sha256}  ${name}`).join("\n");
}

function showPairs(id, pairs, emptyText) {
  const digits = { maximumFractionDigits: 4 };
  const rows = Object.entries(pairs).flatMap(([name, value]) => [
    make("dt", {}, name.replaceAll("_", " ")),
    make("dd", {}, typeof value === "number" ? value.toLocaleString("en", digits) : value),
  ]);
  byId(id).replaceChildren(...(rows.length ? rows : [make("dt", {}, emptyText), make("dd")]));
}
