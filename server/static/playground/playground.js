// The playground: a prompt or a conversation, and the actions of the buttons.

import { asConversation, Conversation } from "./chat.js";
import { Columns } from "./columns.js";
import { Conversations } from "./conversations.js";
import * as copying from "../common/copying.js";
import { byId } from "../common/dom.js";
import { Run } from "./run.js";
import * as next from "./next.js";
import * as popover from "./popover.js";
import { load, save as store } from "../common/storage.js";
import { showWelcome } from "./welcome.js";

let storageName; // one for each model
let columns;
let runs; // theirs
let conversation; // the shown one
let conversations;
let hasChat;
let sending = Promise.resolve(); // never rejects
let answered = null; // the input whose answer is shown
let latest = null; // the last action that was asked for
let link; // the state in this tab's address, restored without it

const isChat = () => hasChat && byId("mode-chat").checked;

export function start(card) {
  hasChat = card.has_chat_template;
  storageName = `playground-${card.model}`;
  link = load(`link-${card.model}`, "sessionStorage");
  showWelcome(card);
  columns = new Columns(card, makeRun, changed);
  ({ runs } = columns);
  conversation = new Conversation(save);
  conversations = new Conversations(conversation, answerOfChat, (choose) =>
    afterStop(() => {
      if (answerOfChat()) keepAnswer(runs[0]);
      save();
      choose();
      clearAnswers();
    }),
  );
  restore();
  wire(card);
  layOut();
}

function makeRun(name, card) {
  const run = new Run(name, card, changed, branchOff);
  run.part("copy").addEventListener("click", () => copy(run));
  run.part("keep").addEventListener("click", () => keepAnswer(run).focus());
  return run;
}

/** Return what a link needs to reproduce the shown answers: input, settings, seed and branch. */
export function state() {
  const params = new URLSearchParams();
  if (!answered) return params;
  if ("prompt" in answered) params.set("prompt", answered.prompt);
  else params.set("messages", JSON.stringify(answered.messages));
  for (const [i, { branches, card }] of columns.shown.entries()) {
    if (!branches.shown) continue; // compared since
    const [{ sent, settings }] = branches.all;
    const model = i && columns.areOfTwoModels ? { model: card.model } : {};
    const all = { ...model, ...settings, seed: sent.body.seed, branch: branches.path };
    for (const [name, value] of Object.entries(all))
      if (value !== "")
        params.set((i ? "b." : "") + name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  return params;
}

/** Restore the state of a link, and answer it. */
export function open(params) {
  if (`${params}` === link) return; // a way back, or the same page again
  const [own, second] = [{}, {}];
  for (const [name, value] of params)
    if (name.startsWith("b.")) second[name.slice(2)] = value;
    else own[name] = value;
  const { prompt, messages } = own;
  const compare = Object.keys(second).length > 0;
  try {
    const input = messages ? { chat: true } : { chat: false, prompt };
    fill({ ...load(storageName), compare, ...input, settings: [own, second] });
    if (messages) conversations.add(asConversation(JSON.parse(messages)));
  } catch {
    return; // not a link of this page
  }
  changed();
  afterStop(async () => {
    await (sending = columns.compareWith(second.model ?? runs[0].card.model, second));
    if (own.seed) generate([own.branch, second.branch]);
  });
}

function wire(card) {
  byId("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  byId("stop").addEventListener("click", stop);
  byId("regenerate").addEventListener("click", regenerate);
  byId("clear").addEventListener("click", clear);
  byId("shaded").addEventListener("change", changed);
  byId("modes").addEventListener("change", changeMode);
  byId("other-model").addEventListener("change", ({ target }) =>
    afterStop(() => (sending = columns.compareWith(target.value))),
  );
  byId("prompt-form").addEventListener("input", save);
  byId("message").addEventListener("input", () => byId("message").setCustomValidity(""));
  byId("examples").addEventListener("click", useExample);
  copying.start();
  popover.start();
  next.start(card, runs[0]);
}

/** Answer the input; `paths` are those that a link names to branches of each column's answer. */
const generate = (paths = []) =>
  afterStop(() => {
    if (!areSettingsValid() || (isChat() && !hasMessage())) return null;
    if (isChat()) commitTurns();
    return send(input(), paths);
  });

const regenerate = () =>
  afterStop(() => {
    for (const { settings } of columns.shown) settings.nextSeed();
    return areSettingsValid() ? send(answered) : null;
  });

const areSettingsValid = () => columns.shown.every((run) => run.settings.fields() !== null);

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
function send(sentInput, paths = []) {
  answered = sentInput;
  const seed = Math.floor(Math.random() * 2 ** 32);
  return follow(() =>
    columns.shown.map((run, i) => run.send(run.request(sentInput, seed), paths[i])),
  );
}

/** Write what is shown into the address, and keep it for a page that returns there. */
function showLink() {
  link = `${state()}`;
  store(`link-${runs[0].card.model}`, link, "sessionStorage");
  window.dispatchEvent(new Event("kvasir:state"));
}

/** Show a branch of a run's answer, which is sent if it is new. */
const branchOff = (run, branch) =>
  afterStop(() => {
    const isNew = !branch.timings;
    run.show(branch);
    if (isNew) return follow(() => [run.read()]);
    showLink();
    return layOut();
  });

/** Be busy until the answers that `begin` asks for have ended. It returns promises of their ends. */
async function follow(begin) {
  const isRegenerating = document.activeElement === byId("regenerate");
  keepFocus(byId("stop"), () => {
    sending = Promise.all(begin());
    setBusy(true, "Generating.");
  });
  showLink();
  runs[0].tokens.card.scrollIntoView({ block: "nearest" });
  save();
  const ends = (await sending).join(", ");
  const canRegenerate = isRegenerating && columns.shown.some((run) => run.hasAnswer);
  keepFocus(byId(canRegenerate ? "regenerate" : "generate"), () =>
    setBusy(false, `Done. Finish reason: ${ends}.`),
  );
  save();
}

function setBusy(isBusy, message) {
  byId("generation-status").textContent = message;
  byId("stop").disabled = !isBusy;
  layOut();
}

/** Make a change. If it disables, hides or removes the focused element, focus `next`. */
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
    if (answerOfChat()) keepAnswer(runs[0]);
    else clearAnswers();
  });

/** Return the shown answer of a conversation, of which it is no turn yet; null if there is none. */
const answerOfChat = () =>
  runs[0].hasAnswer && "messages" in answered ? runs[0].answer : null;

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
  const turn = conversation.addAnswer(run.answer);
  clearAnswers();
  return turn;
}

/** Show the request of the current answer, or the next one if there is none yet, as code. */
function copy(run) {
  const request = run.branches.shown?.sent ?? run.request(input());
  if (request) copying.open(request);
}

function useExample(event) {
  const example = event.target.closest("button");
  if (!example) return;
  byId("prompt").value = example.textContent;
  changed();
  byId("prompt").focus();
}

function changed() {
  layOut();
  save();
}

function layOut() {
  columns.layOut(isChat());
  byId("playground").classList.toggle("unshaded", !byId("shaded").checked);
  byId("modes").hidden = !hasChat;
  byId("no-chat").hidden = hasChat;
  byId("completion-input").hidden = isChat();
  byId("chat-input").hidden = !isChat();
  byId("upcoming").classList.toggle("of-prompt", !isChat());
  next.refresh();
  byId("regenerate").disabled = !columns.shown.some((run) => run.hasAnswer);
  for (const run of runs)
    run.part("keep").hidden = !isChat() || run.isRunning || !run.hasAnswer;
}

function save() {
  store(storageName, {
    prompt: byId("prompt").value,
    chat: hasChat ? byId("mode-chat").checked : undefined,
    compare: columns.areCompared,
    other: runs[1].card.model,
    shaded: byId("shaded").checked,
    conversations: conversations.state(),
    settings: runs.map((run) => run.settings.state()),
  });
}

function restore() {
  try {
    const kept = load(storageName) ?? {};
    fill(kept);
    if (kept.compare && kept.other)
      sending = columns.compareWith(kept.other, kept.settings?.[1]);
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
  if (kept.conversations) conversations.restore(kept.conversations);
  else conversation.restore({ message: byId("message").defaultValue });
}
