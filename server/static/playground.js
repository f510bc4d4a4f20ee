// The playground: a prompt or a conversation, one column or two, and what the buttons do.

import { Conversation } from "./chat.js";
import * as copying from "./copying.js";
import { byId } from "./dom.js";
import { Run } from "./run.js";

const STORED = "kvasir-playground";

let runs;
let conversation;
let hasChat;
let sending = Promise.resolve();
let latest = null;

const isChat = () => hasChat && byId("mode-chat").checked;
const isComparing = () => byId("compare").checked;
const shownRuns = () => (isComparing() ? runs : runs.slice(0, 1));

export function start(card) {
  hasChat = card.has_chat_template;
  runs = ["a", "b"].map((name) => new Run(name, card, changed));
  conversation = new Conversation(save);
  for (const run of runs) {
    byId("runs").append(run.element);
    run.part("copy").addEventListener("click", () => copy(run));
    run.part("keep").addEventListener("click", () => keep(run));
  }
  restore();
  layOut();
  wire();
}

function wire() {
  byId("prompt-form").addEventListener("submit", (event) => act(event, generate));
  byId("stop").addEventListener("click", stop);
  byId("regenerate").addEventListener("click", regenerate);
  byId("clear").addEventListener("click", clear);
  byId("shaded").addEventListener("change", changed);
  for (const id of ["mode-completion", "mode-chat"]) byId(id).addEventListener("change", () => afterStop(forget));
  byId("compare").addEventListener("change", changed);
  byId("prompt-form").addEventListener("input", save);
  byId("examples").addEventListener("click", useExample);
  byId("playground").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(event, generate);
  });
  copying.start();
}

function act(event, action) {
  event.preventDefault();
  action();
}

const generate = () => afterStop(() => {
  if (isChat()) goOn();
  return send();
});

const regenerate = () => afterStop(() => {
  for (const { settings } of shownRuns()) settings.nextSeed();
  return send();
});

/** In a conversation, what is shown is the answer to the last message: before the next one it becomes a turn. */
function goOn() {
  if (byId("message").value && runs[0].hasAnswer) keep(runs[0]);
  conversation.take();
}

/** Both columns get the same seed, so that what differs comes from their settings. */
async function send() {
  const seed = Math.floor(Math.random() * 2 ** 32);
  const requests = shownRuns().map((run) => run.request(input(), seed));
  if (requests.includes(null)) return;
  save();
  sending = Promise.all(shownRuns().map((run, i) => run.send(requests[i])));
  busy(true);
  try {
    say(`Done: ${(await sending).join(", and ")}.`);
  } finally {
    busy(false);
  }
}

const input = () => (isChat() ? { messages: conversation.messages() } : { prompt: byId("prompt").value });

const clear = () => afterStop(() => {
  if (isChat()) conversation.clear();
  else byId("prompt").value = "";
  forget();
  byId(isChat() ? "message" : "prompt").focus();
});

function forget() {
  for (const run of runs) run.clear();
  changed();
}

function stop() {
  for (const run of runs) run.stop();
}

/** Do it once what runs has ended: what came late would be shown as the next one's. Of several, do the last. */
async function afterStop(action) {
  const own = (latest = action);
  stop();
  await sending;
  if (latest === own) await action();
}

function keep(run) {
  conversation.add("assistant", run.tokens.text);
  forget();
}

function copy(run) {
  const request = run.request(input());
  if (request) copying.open(request);
}

function busy(isBusy) {
  if (isBusy) say("Generating.");
  if (!isBusy && document.activeElement === byId("stop")) byId("generate").focus(); // a disabled button loses the focus
  byId("stop").disabled = !isBusy;
  layOut();
}

const say = (what) => {
  byId("generation-status").textContent = what;
};

function useExample(event) {
  const example = event.target.closest("button");
  if (!example) return;
  byId("prompt").value = example.textContent;
  save();
  byId("prompt").focus();
}

function changed() {
  layOut();
  save();
}

function layOut() {
  const section = byId("playground");
  section.classList.toggle("comparing", isComparing());
  section.classList.toggle("unshaded", !byId("shaded").checked);
  byId("modes").hidden = !hasChat;
  byId("no-chat").hidden = hasChat;
  byId("completion-input").hidden = isChat();
  byId("chat-input").hidden = !isChat();
  runs[1].element.hidden = !isComparing();
  runs[0].settings.markDifferences(isComparing() ? runs[1].settings : null);
  runs[1].settings.markDifferences(isComparing() ? runs[0].settings : null);
  byId("regenerate").disabled = !shownRuns().some((run) => run.hasAnswer);
  for (const run of runs) run.part("keep").hidden = !isChat() || run.isRunning || !run.hasAnswer;
}

function save() {
  const kept = {
    prompt: byId("prompt").value,
    chat: byId("mode-chat").checked,
    compare: isComparing(),
    shaded: byId("shaded").checked,
    conversation: conversation.state(),
    settings: runs.map((run) => run.settings.state()),
  };
  localStorage.setItem(STORED, JSON.stringify(kept));
}

function restore() {
  const kept = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  byId("prompt").value = kept.prompt ?? byId("examples").querySelector("button").textContent;
  byId(kept.chat ?? hasChat ? "mode-chat" : "mode-completion").checked = true;
  byId("compare").checked = kept.compare ?? false;
  byId("shaded").checked = kept.shaded ?? true;
  for (const [i, run] of runs.entries()) run.settings.restore(kept.settings?.[i]);
  conversation.restore(kept.conversation ?? { message: byId("message").defaultValue });
}
