// What the events of a stream say, whichever route they come from: { text, tokens, finish, usage }.
//
// A token is { name, text, logprob, top: [{ name, logprob }] }; `text` is null where it is a part of a character.

const BYTES = "bytes:"; // how /v1/completions names a token that is no whole characters

export function ofCompletion({ choices: [choice], usage }) {
  const scored = choice?.logprobs;
  const tokens = (scored?.tokens ?? []).map((name, i) => ({
    ...named(name),
    logprob: scored.token_logprobs[i],
    top: likeliestFirst(scored.top_logprobs[i]),
  }));
  return { text: choice?.text ?? "", tokens, finish: choice?.finish_reason, usage };
}

/** Of an object of logprobs by name, which puts names that are digits first. */
function likeliestFirst(logprobs) {
  const all = Object.entries(logprobs).map(([name, logprob]) => ({
    name: named(name).name,
    logprob,
  }));
  return all.sort((one, other) => other.logprob - one.logprob);
}

function named(name) {
  const isPart = name.startsWith(BYTES) && name.includes("\\x");
  return isPart ? { name: name.slice(BYTES.length), text: null } : { name, text: name };
}

export function ofChat({ choices: [choice], usage }) {
  const tokens = (choice?.logprobs?.content ?? []).map((entry) => ({
    ...read(entry),
    top: entry.top_logprobs.map(read).map(({ name, logprob }) => ({ name, logprob })),
  }));
  return { text: choice?.delta.content ?? "", tokens, finish: choice?.finish_reason, usage };
}

/** `bytes` are null for a token that adds nothing to the text. */
function read({ token, logprob, bytes }) {
  if (bytes === null || !token.includes("\ufffd"))
    return { name: token, text: bytes === null ? "" : token, logprob };
  return {
    name: bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join(""),
    text: null,
    logprob,
  };
}
