// Events of a stream in one form for all routes: { text, tokens, finish, usage }.
//
// A token is { name, text, logprob, top: [{ name, logprob }] }. `text` is null if the token is only
// a part of a character.

const BYTES = "bytes:"; // prefix with which /v1/completions names a token that is not valid text

/** Read an event of /v1/completions. */
export function fromCompletion({ choices: [choice], usage }) {
  const scored = choice?.logprobs;
  const tokens = (scored?.tokens ?? []).map((name, i) => ({
    ...parseName(name),
    logprob: scored.token_logprobs[i],
    top: sortByLogprob(scored.top_logprobs[i]),
  }));
  return { text: choice?.text ?? "", tokens, finish: choice?.finish_reason, usage };
}

/** Sort log-probabilities by value: in JavaScript objects, names that are integers come first. */
function sortByLogprob(logprobs) {
  const all = Object.entries(logprobs).map(([name, logprob]) => ({
    name: parseName(name).name,
    logprob,
  }));
  return all.sort((one, other) => other.logprob - one.logprob);
}

function parseName(name) {
  const isPart = name.startsWith(BYTES) && name.includes("\\x");
  return isPart ? { name: name.slice(BYTES.length), text: null } : { name, text: name };
}

/** Read an event of /v1/chat/completions. */
export function fromChat({ choices: [choice], usage }) {
  const tokens = (choice?.logprobs?.content ?? []).map((entry) => ({
    ...readToken(entry),
    top: entry.top_logprobs.map(readToken).map(({ name, logprob }) => ({ name, logprob })),
  }));
  return { text: choice?.delta.content ?? "", tokens, finish: choice?.finish_reason, usage };
}

/** Read a scored token. `bytes` is null for a token that adds nothing to the text. */
function readToken({ token, logprob, bytes }) {
  if (bytes === null || !token.includes("\ufffd"))
    return { name: token, text: bytes === null ? "" : token, logprob };
  return {
    name: bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join(""),
    text: null,
    logprob,
  };
}
