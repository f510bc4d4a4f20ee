// The model card: what is served, drawn and in figures, all of it from GET /model.

import { stepsOf } from "./anatomy.js";
import { drawArchitecture } from "./architecture.js";
import { copyText } from "../shared/copying.js";
import { byId, make } from "../shared/dom.js";
import { formatBytes, formatCompact, formatCount, formatShare } from "../shared/format.js";
import { parametersOf } from "./parameters.js";

export function start(card) {
  byId("architecture").append(
    drawArchitecture(card.config, "architecture-title architecture-about"),
  );
  byId("architecture-words").append(...listed(stepsOf(card.config)));
  showFacts(card);
  showParameters(card);
  showFiles(card.files);
  showPairs(
    "model-generation",
    card.generation,
    "None: requests are sampled as the API's defaults say.",
  );
  showPairs("model-source", card.source, "Not told.");
  showPairs("model-versions", card.versions, "Not told.");
  byId("hashes-copy").addEventListener("click", copyHashes);
}

/** Steps as items of a list, a repetition as a list of its own. */
function listed(steps) {
  return steps.map(({ title, notes, times, steps: repeated, branches }) => {
    if (times)
      return make("li", {}, `${formatCount(times)} times:`, make("ol", {}, ...listed(repeated)));
    if (!branches) return make("li", {}, [title, notes.join("; ")].filter(Boolean).join(": "));
    const lists = branches.map((branch) => make("ol", {}, ...listed(branch)));
    const text =
      branches.length > 1 ? "Added to what goes in, each of these two:" : "Added to what goes in:";
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
  const gone = sizes.includes(null) ? ", without files that have gone" : "";
  return {
    name: card.model,
    summary:
      `A decoder of ${formatCompact(card.parameters)} parameters in ${formatCount(config.n_layer)} layers. It reads ` +
      `up to ${formatCount(card.max_model_len)} tokens, its own among them, and says how likely each of ` +
      `${formatCount(config.vocab_size)} tokens is to be the next.`,
    parameters: `${formatCompact(card.parameters)} (${formatCount(card.parameters)})`,
    precision: card.precision,
    device: card.device,
    size: `${formatBytes(size)} (${formatCount(size)} bytes${gone})`,
    length: `${formatCount(card.max_model_len)} tokens`,
    batch: `${formatCount(card.max_num_seqs)} sequences`,
    chat: card.has_chat_template ? "yes: it has a chat template" : "no: it continues texts",
    attention: card.has_attention ? "yes" : "no: the model directory has no attention.onnx",
  };
}

function memoryFacts({ config, kv_cache: cache, max_model_len: length }) {
  if (cache === null)
    return { token: "known when the model is loaded", prompt: "–", sequence: "–", budget: "–" };
  const { n_layer: layers, n_kv_head: heads, head_dim: channels } = config;
  const { bytes_per_token: bytes, prompt_bytes_per_token: more, budget_tokens: budget } = cache;
  const each = bytes / (2 * layers * heads * channels);
  return {
    token:
      `${formatBytes(bytes)} = 2 × ${layers} layers × ${heads} heads × ${channels} channels × ` +
      `${each} ${each === 1 ? "byte" : "bytes"}`,
    prompt: more
      ? `${formatBytes(more)} more, as 32-bit floats, until all of it is computed`
      : "no more than others",
    sequence: `${formatBytes(bytes * length)} for ${formatCount(length)} tokens`,
    budget: `${formatBytes(bytes * budget)}: ${formatCount(budget)} tokens of all sequences`,
  };
}

function verificationFacts(verification) {
  const { perplexity_torch: before, perplexity_onnx: after } = verification;
  const told = (value, format) => (value === null ? "not measured" : format(value));
  const change = before
    ? ` (${formatShare(Math.abs(after / before - 1))} ${after < before ? "lower" : "higher"})`
    : "";
  return {
    error: told(verification.max_logit_error, (value) => value.toPrecision(3)),
    agreement: told(verification.greedy_agreement, formatShare),
    "perplexity-torch": told(before, (value) => value.toFixed(3)),
    "perplexity-onnx": told(after, (value) => value.toFixed(3) + change),
    text:
      verification.text === null
        ? "Perplexity was not measured."
        : `Perplexity is of: ${verification.text}.`,
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
      const size = bytes === null ? "has gone since the start" : formatBytes(bytes);
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

function showPairs(id, pairs, none) {
  const rows = Object.entries(pairs).flatMap(([name, value]) => [
    make("dt", {}, name.replaceAll("_", " ")),
    make(
      "dd",
      {},
      typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value,
    ),
  ]);
  byId(id).replaceChildren(...(rows.length ? rows : [make("dt", {}, none)]));
}

async function copyHashes() {
  byId("hashes-copied").textContent = await copyText(byId("hashes"));
}
