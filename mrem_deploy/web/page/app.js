// The page. Texts and names are only ever set as text, never as HTML.
import { Failure, Model } from "./model.js";
import { dot, median, sentenceVector, sigmoid, softmax } from "./numbers.js";

const at = (id) => document.getElementById(id);
const WAIT = 200; // ms without a key before it runs
const MOST_BARS = 10;
const MIB = 2 ** 20;
const times = [];
const vectors = new Map(); // sentence → vector, for embeddings
let model, running = false, again = false;

function element(kind, text = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
const milliseconds = (ms) => `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
const embeds = () => model.settings.kind === "embedding";

function showFacts(settings, load = null) {
  document.title = settings.title;
  at("title").textContent = settings.title;
  const size = (settings.file_bytes / MIB).toFixed(1);
  const facts = [`${settings.bits} bits`, `${size} MiB (${settings.full_precision_mib.toFixed(1)} MiB in full precision)`, `up to ${settings.max_length} tokens`];
  if (load) facts.push(`loaded in ${seconds(load.fetch + load.prepare)}`);
  at("facts").replaceChildren(...facts.map((fact) => element("li", fact)));
}

function showLoading(settings, share) {
  showFacts(settings);
  const whole = (settings.file_bytes + settings.runtime_bytes) / MIB;
  at("loading-words").textContent = share < 1 ? `Loading ${whole.toFixed(1)} MiB …` : "Preparing the model …";
  at("loading-bar").value = Math.min(share, 1);
}

function showForm() {
  const { pair, examples, sentences } = model.settings;
  at("loading").hidden = true;
  at("form").hidden = false;
  at("second-field").hidden = !pair;
  if (pair) at("first-label").textContent = "First sentence";
  if (embeds()) {
    at("first-label").textContent = "What are you looking for?";
    at("answer-title").textContent = "Nearest sentences";
    at("library").hidden = false;
    at("sentences").value = sentences.join("\n");
  }
  at("examples").replaceChildren(...examples.map((texts) => {
    const button = element("button", texts.filter(Boolean).join(" · "));
    button.type = "button";
    button.addEventListener("click", () => {
      [at("first").value, at("second").value] = [texts[0], texts[1] ?? ""];
      run();
    });
    return button;
  }));
  at("examples").hidden = !examples.length;
  at("answer").hidden = false;
}

function showBars(rows) {
  const shown = rows.slice(0, MOST_BARS);
  at("bars").replaceChildren(...shown.map(({ name, share, value }) => {
    const row = element("li"), head = element("div", "", "head"), track = element("div", "", "track"), fill = element("div", "", "fill");
    fill.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
    head.append(element("span", name, "name"), element("span", value, "value"));
    track.setAttribute("aria-hidden", "true");
    track.append(fill);
    row.append(head, track);
    return row;
  }));
}

function showTimes(ms, tokens) {
  times.push(ms);
  const { fetch, prepare } = model.load;
  const rows = [
    ["this run", milliseconds(ms)], ["median", `${milliseconds(median(times.slice(-50)))} of ${times.length}`], ["tokens", String(tokens)],
    ["fetched in", seconds(fetch)], ["prepared in", seconds(prepare)],
  ];
  at("times").replaceChildren(...rows.map(([what, value]) => {
    const row = element("div");
    row.append(element("dt", what), element("dd", value));
    return row;
  }));
  Object.assign(at("times").dataset, { ms: String(ms), fetch: String(fetch), prepare: String(prepare) });
}

function showRaw(tokens, values) {
  at("tokens").replaceChildren(...tokens.map((token) => element("span", token)));
  at("raw").textContent = values.map((value) => value.toPrecision(9)).join("\n");
}

const say = (text) => { at("note").textContent = text; };
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function classRows(values) {
  const { kind, labels } = model.settings;
  if (kind === "score") return values.map((value) => ({ name: labels[0], share: sigmoid(value), value: value.toFixed(3) }));
  const shares = kind === "multi-label" ? values.map(sigmoid) : softmax(values);
  const rows = shares.map((share, i) => ({ name: labels[i], share, value: percent(share) }));
  return rows.sort((a, b) => b.share - a.share);
}

async function vectorOf(text, role) {
  const found = await model.run(model.settings.prompts[role] + text);
  const [, tokens, width] = found.shape;
  return { ...found, vector: sentenceVector(found.values, tokens, width, model.settings.pooling) };
}

async function nearest(query) {
  const asked = await vectorOf(query, "query");
  const sentences = [...new Set(at("sentences").value.split("\n").map((line) => line.trim()).filter(Boolean))];
  for (const [number, sentence] of sentences.entries()) {
    if (vectors.has(sentence)) continue;
    say(`Reading sentence ${number + 1} of ${sentences.length} …`);
    vectors.set(sentence, (await vectorOf(sentence, "document")).vector);
    await new Promise((resolve) => setTimeout(resolve)); // let keys and clicks through
  }
  const rows = sentences.map((name) => ({ name, share: dot(asked.vector, vectors.get(name)) }));
  rows.sort((a, b) => b.share - a.share);
  return { ...asked, values: [...asked.vector], rows: rows.map((row) => ({ ...row, value: row.share.toFixed(3) })) };
}

async function answer() {
  const { pair, max_length: longest } = model.settings;
  const texts = [at("first").value.trim(), pair ? at("second").value.trim() : null];
  if (texts.some((text) => text === "")) {
    clearAnswer();
    say(pair ? "Type both sentences." : "Type a sentence.");
    return;
  }
  const found = embeds() ? await nearest(texts[0]) : await model.run(...texts);
  const rows = found.rows ?? classRows(found.values);
  say(found.total > longest ? `Only the first ${longest} of ${found.total} tokens were read.` : "");
  showBars(rows);
  at("spoken").textContent = rows.length ? `${rows[0].name}: ${rows[0].value}` : "There are no sentences to search.";
  showTimes(found.ms, found.tokens.length);
  showRaw(found.tokens, found.values);
  at("details").hidden = false;
  at("failure").hidden = true;
}

function clearAnswer() {
  for (const id of ["bars", "times", "spoken"]) at(id).replaceChildren();
  at("details").hidden = true;
}

// One run at a time; what is typed meanwhile is read by one more run after it.
async function run() {
  if (running) { again = true; return; }
  running = true;
  at("form").setAttribute("aria-busy", "true");
  try {
    do { again = false; await answer(); } while (again);
  } catch (error) {
    fail(`The model could not run: ${error.message}`);
  } finally {
    running = false;
    at("form").removeAttribute("aria-busy");
  }
}

function fail(text) {
  at("failure").textContent = text;
  at("failure").hidden = false;
  at("loading").hidden = true;
}

let timer;
for (const id of ["first", "second", "sentences"]) {
  at(id).addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(run, WAIT); });
  at(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); clearTimeout(timer); run(); }
  });
}
at("form").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); run(); });

try {
  model = await Model.load(showLoading);
  showFacts(model.settings, model.load);
  showForm();
} catch (error) {
  fail(error instanceof Failure ? error.message : `The model could not be loaded: ${error.message}`);
}
