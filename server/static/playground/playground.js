// The playground: a prompt or a conversation, one column or two to compare, and the actions of the
// buttons.

import { Conversation } from "./chat.js";
import * as copying from "../common/copying.js";
import { byId } from "../common/dom.js";
import { Run } from "./run.js";
import { load, save as store } from "../common/storage.js";
import { showWelcome } from "./welcome.js";

let storageName; // one for each model
let runs;
let conversation;
let hasChat;
let sending = Promise.resolve(); // never rejects
let answered = null; // the input whose answer is shown
let latest = null; // the last action that was asked for

const isChat = () => hasChat && byId("mode-chat").checked;
const isComparing = () => byId("compare").checked;
const shownRuns = () => (isComparing() ? runs : runs.slice(0, 1));

export function start(card) {
  hasChat = card.has_chat_template;
  storageName = `playground-${card.model}`;
  showWelcome(card);
  runs = ["a", "b"].map((name) => new Run(name, card, changed));
  conversation = new Conversation(save);
  for (const run of runs) {
    byId("runs").append(run.element);
    run.part("copy").addEventListener("click", () => copy(run));
    run.part("keep").addEventListener("click", () => keepAnswer(run).focus());
  }
  restore();
  layOut();
  wire();
}

function wire() {
  byId("prompt-form").addEventListener("submit", (event) => handle(event, generate));
  byId("stop").addEventListener("click", stop);
  byId("regenerate").addEventListener("click", regenerate);
  byId("clear").addEventListener("click", clear);
  byId("shaded").addEventListener("change", changed);
  for (const id of ["mode-completion", "mode-chat"])
    byId(id).addEventListener("change", changeMode);
  byId("compare").addEventListener("change", changed);
  byId("prompt-form").addEventListener("input", save);
  byId("message").addEventListener("input", () => byId("message").setCustomValidity(""));
  byId("examples").addEventListener("click", useExample);
  byId("playground").addEventListener("keydown", (event) => {
    const isOfPage = !event.target.closest("dialog");
    if (isOfPage && event.key === "Enter" && (event.ctrlKey || event.metaKey))
      handle(event, generate);
  });
  copying.start();
}

function handle(event, action) {
  event.preventDefault();
  action();
}

const generate = () =>
  afterStop(() => {
    if (!areSettingsValid() || (isChat() && !hasMessage())) return null;
    if (isChat()) commitTurns();
    return send(input());
  });

const regenerate = () =>
  afterStop(() => {
    for (const { settings } of shownRuns()) settings.nextSeed();
    return areSettingsValid() ? send(answered) : null;
  });

const areSettingsValid = () => shownRuns().every((run) => run.settings.fields() !== null);

function hasMessage() {
  byId("message").setCustomValidity(conversation.isEmpty ? "Write a message first." : "");
  return byId("message").reportValidity();
}

/** Add the shown answer and the new message to the conversation as turns. */
function commitTurns() {
  if (byId("message").value && runs[0].hasAnswer) keepAnswer(runs[0]);
  conversation.commitMessage();
}

/** Send the input in all columns, with the same seed, so that only settings make a difference. */
async function send(sentInput) {
  answered = sentInput;
  const isRegenerating = document.activeElement === byId("regenerate");
  const seed = Math.floor(Math.random() * 2 ** 32);
  keepFocus(byId("stop"), () => {
    sending = Promise.all(shownRuns().map((run) => run.send(run.request(sentInput, seed))));
    setBusy(true);
  });
  runs[0].reveal();
  save();
  announce(`Done. Finish reason: ${(await sending).join(", ")}.`);
  keepFocus(
    byId(isRegenerating && shownRuns().some((run) => run.hasAnswer) ? "regenerate" : "generate"),
    () => setBusy(false),
  );
  save();
}

/**
 * Make a change. If it disables, hides or removes the focused element, move the focus to `next`.
 */
function keepFocus(next, change) {
  const had = document.activeElement;
  change();
  const isLost = had.disabled || !had.checkVisibility();
  if (isLost) next.focus({ preventScroll: true }); // keep the answer in view
}

const input = () =>
  isChat() ? { messages: conversation.messages() } : { prompt: byId("prompt").value };

const clear = () =>
  afterStop(() => {
    if (isChat()) conversation.clear();
    else byId("prompt").value = "";
    clearAnswers();
    byId(isChat() ? "message" : "prompt").focus();
  });

const changeMode = () =>
  afterStop(() => {
    if (isAnswerOfChat()) keepAnswer(runs[0]);
    else clearAnswers();
  });

const isAnswerOfChat = () => runs[0].hasAnswer && "messages" in answered;

function clearAnswers() {
  for (const run of runs) run.clear();
  changed();
}

function stop() {
  for (const run of runs) run.stop();
}

/**
 * Stop the current run and act once it has ended, so that its late events do not show up in the
 * next one. Of several actions that wait, only the last one happens.
 */
async function afterStop(action) {
  latest = action;
  stop();
  await sending;
  if (latest === action) await action();
}

/** Turn a column's answer into a turn of the conversation, and return the text area to edit it. */
function keepAnswer(run) {
  const turn = conversation.add("assistant", run.tokens.text);
  clearAnswers();
  return turn;
}

/**
 * Show the request of the current answer as code, or the next request if there is no answer yet.
 */
function copy(run) {
  const request = run.sent ?? run.request(input());
  if (request) copying.open(request);
}

function setBusy(isBusy) {
  if (isBusy) announce("Generating.");
  byId("stop").disabled = !isBusy;
  layOut();
}

const announce = (message) => {
  byId("generation-status").textContent = message;
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
  store(storageName, {
    prompt: byId("prompt").value,
    chat: hasChat ? byId("mode-chat").checked : undefined,
    compare: isComparing(),
    shaded: byId("shaded").checked,
    conversation: conversation.state(isAnswerOfChat() ? runs[0].tokens.text : ""),
    settings: runs.map((run) => run.settings.state()),
  });
}

function restore() {
  try {
    fill(load(storageName) ?? {});
  } catch {
    // stored by another version of this page
    fill({});
  }
}

function fill(kept) {
  byId("prompt").value = kept.prompt ?? byId("examples").querySelector("button").textContent;
  byId(hasChat && (kept.chat ?? true) ? "mode-chat" : "mode-completion").checked = true;
  byId("compare").checked = kept.compare ?? false;
  byId("shaded").checked = kept.shaded ?? true;
  for (const [i, run] of runs.entries()) run.settings.restore(kept.settings?.[i]);
  conversation.restore(kept.conversation ?? { message: byId("message").defaultValue });
}
