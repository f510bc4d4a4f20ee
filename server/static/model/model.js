// The model card: the served model as a drawing and in figures, from GET /model.

import { stepsOf } from "./anatomy.js";
import { drawArchitecture } from "./architecture.js";
import { copyText } from "../common/copying.js";
import { byId, make } from "../common/dom.js";
import { formatBytes, formatCompact, formatCount, formatShare } from "../common/format.js";
import { parametersOf } from "./parameters.js";

export function start(card) {
  byId("architecture").append(
    drawArchitecture(card.config, "architecture-title architecture-about"),
  );
  byId("architecture-words").append(...listItems(stepsOf(card.config)));
  showFacts(card);
  showParameters(card);
  showFiles(card.files);
  showPairs("model-generation", card.generation, "None. The API's defaults apply.");
  showPairs("model-source", card.source, "Unknown.");
  showPairs("model-versions", card.versions, "Unknown.");
  byId("hashes-copy").addEventListener("click", copyHashes);
}

/** Return steps as list items. Repetitions and branches become nested lists. */
function listItems(steps) {
  return steps.map(({ title, notes, times, steps: repeated, branches }) => {
    if (times)
      return make("li", {}, `${formatCount(times)} times:`, make("ol", {}, ...listItems(repeated)));
    if (!branches) return make("li", {}, [title, notes.join("; ")].filter(Boolean).join(": "));
    const lists = branches.map((branch) => make("ol", {}, ...listItems(branch)));
    const text =
      branches.length > 1
        ? "Residual: the outputs of these two branches are added to the input:"
        : "Residual: the output is added to the input:";
    return make("li", {}, text, ...lists);
  });
}

function showFacts(card) {
  const facts = {
    ...generalFacts(card),
    ...memoryFacts(card),
    ...verificationFacts(card.verification),
  };
  for (const element of byId("model").querySelectorAll("[data-fact]")) {
    element.textContent = facts[element.dataset.fact];
  }
}

function generalFacts(card) {
  const { config } = card;
  const sizes = card.files.map((file) => file.bytes);
  const size = sizes.reduce((sum, bytes) => sum + (bytes ?? 0), 0);
  const note = sizes.includes(null) ? ", without files that are no longer there" : "";
  return {
    name: card.model,
    summary:
      `${kind(config)} of ${formatCompact(card.parameters)} parameters in ${layers(config)} ` +
      `layers. ${purpose(card)}.`,
    parameters: `${formatCompact(card.parameters)} (${formatCount(card.parameters)})`,
    precision: card.precision,
    device: card.device,
    size: `${formatBytes(size)} (${formatCount(size)} bytes${note})`,
    length: `${formatCount(card.max_model_len)} tokens`,
    batch: `${formatCount(card.max_num_seqs)} sequences`,
    chat: card.has_chat_template
      ? "yes, with its chat template"
      : config.pooling === null
        ? "no chat template: completions only"
        : "no: it generates no text",
    attention: card.has_attention
      ? "yes"
      : card.explain_limits
        ? "no: the model directory has no attention.onnx"
        : "no: switched off",
  };
}

function kind({ causal, encoder }) {
  if (encoder !== null) return "An encoder-decoder";
  return causal ? "A decoder" : "A bidirectional encoder";
}

const layers = ({ encoder, n_layer: own }) =>
  [...(encoder === null ? [] : [encoder.n_layer]), own].map(formatCount).join(" + ");

function purpose({ config: { pooling, vocab_size }, max_model_len, max_source_len }) {
  const [most, size] = [formatCount(max_model_len), formatCount(vocab_size)];
  if (max_source_len !== null)
    return `It reads a source of up to ${formatCount(max_source_len)} tokens, and writes a target of
      up to ${most}, with a probability for each of ${size} possible next tokens`;
  if (pooling === null)
    return `It reads up to ${most} tokens, including those it generates, and gives a probability for
      each of ${size} possible next tokens`;
  const labels = pooling.labels.length;
  const makes = labels
    ? `scores ${labels === 1 ? "a label" : `${labels} labels`}`
    : "makes one vector of them";
  return `It reads up to ${most} tokens and ${makes}`;
}

function memoryFacts({ config, kv_cache: cache, max_source_len: source, max_model_len: target }) {
  if (cache === null)
    return {
      token: config.pooling === null ? "not known until the model is loaded" : "none",
      prompt: "–",
      sequence: "–",
      budget: "–",
    };
  const { n_layer: layers, n_kv_head: heads, head_dim: channels } = config;
  const { bytes_per_token: bytes, prompt_bytes_per_token: more, budget_tokens: budget } = cache;
  const length = target + (source ?? 0);
  const each = bytes / (2 * layers * heads * channels);
  return {
    token:
      `${formatBytes(bytes)} = 2 × ${layers} layers × ${heads} heads × ${channels} channels × ` +
      `${each} ${each === 1 ? "byte" : "bytes"}`,
    prompt: more
      ? `${formatBytes(more)} more, as 32-bit floats, until the prompt is complete`
      : "same as other tokens",
    sequence: `${formatBytes(bytes * length)} for ${formatCount(length)} tokens`,
    budget: `${formatBytes(bytes * budget)}: ${formatCount(budget)} tokens of all sequences`,
  };
}

function verificationFacts(verification) {
  const { perplexity_torch: before, perplexity_onnx: after } = verification;
  const orNone = (value, format) => (value === null ? "not measured" : format(value));
  const change = before
    ? ` (${formatShare(Math.abs(after / before - 1))} ${after < before ? "lower" : "higher"})`
    : "";
  return {
    error: orNone(verification.max_logit_error, (value) => value.toPrecision(3)),
    agreement: orNone(verification.greedy_agreement, formatShare),
    "perplexity-torch": orNone(before, (value) => value.toFixed(3)),
    "perplexity-onnx": orNone(after, (value) => value.toFixed(3) + change),
    text:
      verification.text === null
        ? "Perplexity was not measured."
        : `Perplexity was measured on: ${verification.text}.`,
  };
}

function showParameters({ config, parameters }) {
  const parts = parametersOf(config);
  const sum = parts.reduce((total, [, count]) => total + count, 0);
  byId("parameters-parts").append(
    ...parts.map(([name, count]) => {
      const bar = make("span", { class: "part-bar" });
      bar.style.width = `${(100 * count) / sum}%`;
      return rowOf(
        name,
        formatCount(count),
        formatShare(count / sum),
        make("span", { class: "part" }, bar),
      );
    }),
  );
  byId("parameters-sum").textContent = formatCount(sum);
  byId("parameters-differ").hidden = sum === parameters;
  byId("parameters-manifest").textContent = formatCount(parameters);
}

function rowOf(name, count, share, bar) {
  const numbers = [count, share].map((text) => make("td", { class: "number" }, text));
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, name),
    ...numbers,
    make("td", { "aria-hidden": "true" }, bar),
  );
}

function showFiles(files) {
  byId("files-list").append(
    ...files.map(({ name, bytes }) => {
      const size = bytes === null ? "no longer there" : formatBytes(bytes);
      const cell = make(
        "td",
        { class: "number", title: bytes === null ? "" : `${formatCount(bytes)} bytes` },
        size,
      );
      return make("tr", {}, make("th", { scope: "row" }, make("code", {}, name)), cell);
    }),
  );
  byId("hashes").textContent = files.map(({ name, sha256 }) => `${sha256}  ${name}`).join("\n");
}

function showPairs(id, pairs, emptyText) {
  const rows = Object.entries(pairs).flatMap(([name, value]) => [
    make("dt", {}, name.replaceAll("_", " ")),
    make(
      "dd",
      {},
      typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value,
    ),
  ]);
  byId(id).replaceChildren(...(rows.length ? rows : [make("dt", {}, emptyText)]));
}

async function copyHashes() {
  byId("hashes-copied").textContent = await copyText(byId("hashes"));
}
