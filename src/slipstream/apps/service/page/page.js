// The page of `slipstream serve`. Texts, names and classes are users' own: they reach the document
// only as text (textContent, append), never as markup.

// ---- training data: the checks of rows.py, so that a refusal shows before anything is sent

// Until the service has said what its operator has set.
export const LIMITS = { rows: [5, 20000], classes: [2, 3000], text: 1024, name: 256, record: 4 << 20 };
const TOO_LONG = "Phrase too long";
const MOST_LINES = 20; // of rows that cannot be used, that a refusal names
const LF = 10;
const CR = 13;
const ARCHIVES = [[0x50, 0x4b, 0x03, 0x04], [0xd0, 0xcf, 0x11, 0xe0]];
const CONTROLS = /\\[tnr]|[\x01-\x1f\x7f-\x9f]/g;
const CLASS_CONTROLS = /[\x01-\x1f\x7f-\x9f]/g;
const CLASS_BREAKS = /[\t\n\r\x85\u2028\u2029]/;
// What Python strips: U+FEFF, which trim() takes away, stays.
const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
const EDGES = new RegExp(`^${SPACE}|${SPACE}$`, "g");

const strip = (text) => text.replace(EDGES, "");
const count = (number) => number.toLocaleString("en-US");
const characters = (text) => [...text].length;

/** Why training data cannot be used, in the service's words. */
export class Refused extends Error {
  constructor(error, description) {
    super(`${error}. ${description}`);
    this.error = error;
    this.description = description;
  }
}

const malformed = (description) => new Refused("Malformed data", description);

/** Training data as it is read: feed() its bytes, then end(); refuse() throws why it cannot be used. */
export class TrainingData {
  rows = 0;
  classes = new Map(); // how many rows each has
  long = 0; // texts that are too long
  #bad = []; // rows that cannot be used: {line, long, other}, the reason if the text is cut, and if not
  #broken = null; // why it is no CSV from there on
  #signs = new Signs();
  #rest = new Uint8Array();
  #begun = false;
  #line = 0;
  #decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  #record = null; // while a quoted field is open: where it began, its fields and its text

  /** False once the rest need not be read. */
  feed(bytes, last = false) {
    if (this.#broken) return false;
    try {
      return this.#feed(bytes, last);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#broken = error;
      return false;
    }
  }

  #feed(bytes, last) {
    const block = new Uint8Array(this.#rest.length + bytes.length);
    block.set(this.#rest);
    block.set(bytes, this.#rest.length);
    if (!this.#begun && block.length < 4 && !last) {
      this.#rest = block;
      return true;
    }
    let from = this.#begun ? 0 : this.#begin(block);
    for (let at = from; at < block.length; at++) {
      if (block[at] !== LF && block[at] !== CR) continue;
      // A CR at the end may be the first half of a CRLF: it waits for the next bytes.
      if (block[at] === CR && at + 1 === block.length && !last) break;
      this.#feedLine(block.subarray(from, at));
      if (block[at] === CR && block[at + 1] === LF) at++;
      from = at + 1;
      if (this.rows > LIMITS.rows[1]) return false;
    }
    this.#rest = block.slice(from);
    if (this.#rest.length > (last ? 0 : LIMITS.record)) {
      this.#feedLine(this.#rest);
      this.#rest = new Uint8Array();
    }
    return this.rows <= LIMITS.rows[1];
  }

  end() {
    if (this.#broken || this.rows > LIMITS.rows[1]) return;
    this.feed(new Uint8Array(), true);
    if (this.#record) this.#broken ??= this.#unclosed();
  }

  /** Throws Refused if it cannot be used, with long texts cut or not. */
  refuse(cut = false) {
    const bad = this.#bad.filter(({ other }) => !cut || other);
    if (bad.length) throw this.#unusable(bad.map((row) => ({ ...row, reason: (!cut && row.long) || row.other })));
    if (this.#broken) throw this.#broken;
    if (this.rows > LIMITS.rows[1]) return;
    if (this.rows < LIMITS.rows[0]) {
      throw new Refused("Data too small", `The number of training entries received = ${this.rows}, `
        + `which is smaller than the required minimum of ${LIMITS.rows[0]}`);
    }
    if (this.classes.size < LIMITS.classes[0]) {
      throw new Refused("Too few classes", `The training data has ${this.classes.size} class; `
        + `a classifier needs at least ${LIMITS.classes[0]}.`);
    }
  }

  /** The reason of the first bad row; of several, with their lines. */
  #unusable(bad) {
    const [{ reason }] = bad;
    if (bad.length === 1) return reason;
    const lines = bad.slice(0, MOST_LINES).map(({ line }) => count(line)).join(", ");
    const within = this.rows > LIMITS.rows[1] ? `Of the first ${count(LIMITS.rows[1])} rows, ` : "";
    const some = bad.length > MOST_LINES ? `the first ${MOST_LINES} at lines` : "at lines";
    const after = this.#broken ? ` The rows after them were not read: ${this.#broken.description}` : "";
    return new Refused(reason.error, `${reason.description} ${within}${count(bad.length)} rows cannot be used, `
      + `${some} ${lines}.${after}`);
  }

  /** What looks like a mistake in data that can be used: sentences. */
  warnings() {
    return this.#signs.warnings(this);
  }

  #begin(block) {
    this.#begun = true;
    if (ARCHIVES.some((magic) => magic.every((byte, at) => block[at] === byte))) {
      throw malformed("The training data is a zip file or a spreadsheet, not a CSV: export it as CSV.");
    }
    return block[0] === 0xef && block[1] === 0xbb && block[2] === 0xbf ? 3 : 0;
  }

  #feedLine(bytes) {
    this.#line++;
    let line;
    try {
      line = this.#decoder.decode(bytes);
    } catch {
      throw malformed(`The training data is not UTF-8: line ${count(this.#line)}. Save it as CSV in UTF-8.`);
    }
    if (line.includes("\0")) {
      throw malformed(`The training data has a NUL character: line ${count(this.#line)}.`);
    }
    if (this.#record || strip(line) !== "") this.#parse(line);
  }

  #parse(line) {
    const record = this.#record ?? { line: this.#line, length: 0, fields: [], open: false, text: "" };
    this.#record = record;
    record.length += line.length + 1;
    if (record.length > LIMITS.record) {
      throw record.open ? this.#unclosed() : malformed(
        `The row at line ${count(record.line)} has more than ${count(LIMITS.record)} characters.`);
    }
    let at = 0;
    if (record.open) {
      record.text += "\n";
      at = this.#quoted(line, 0);
    }
    while (at <= line.length && !record.open) at = this.#field(line, at);
    if (record.open) return;
    this.#record = null;
    this.#add(record);
  }

  /** Read the field that begins at `at`; returns where the next one begins. */
  #field(line, at) {
    const start = at + line.slice(at).match(/^[ \t]*/)[0].length;
    if (line[start] === '"') {
      this.#record.open = true;
      this.#record.text = "";
      return this.#quoted(line, start + 1);
    }
    const end = comma(line, at);
    this.#record.fields.push(line.slice(at, end));
    return end + 1;
  }

  #quoted(line, at) {
    const record = this.#record;
    for (let quote; (quote = line.indexOf('"', at)) >= 0; at = quote + 2) {
      if (line[quote + 1] === '"') {
        record.text += line.slice(at, quote + 1);
        continue;
      }
      record.fields.push(record.text + line.slice(at, quote));
      record.open = false;
      const end = comma(line, quote + 1);
      if (strip(line.slice(quote + 1, end))) {
        throw malformed(`The row at line ${count(record.line)} has text after a closing quote: `
          + "double the quotes inside a quoted value.");
      }
      return end + 1;
    }
    record.text += line.slice(at);
    return line.length + 1;
  }

  #unclosed() {
    return malformed(`The row at line ${count(this.#record.line)} has a quote that never ends.`);
  }

  #add({ line, fields }) {
    if (++this.rows > LIMITS.rows[1]) return;
    const text = strip(fields[0].replace(CONTROLS, " "));
    const long = tooLong(line, text);
    if (long) this.long++;
    let other = null;
    try {
      const names = classNames(line, text, fields);
      for (const name of names) this.classes.set(name, (this.classes.get(name) ?? 0) + 1);
      this.#signs.add(line, text, names, spacedClasses(fields));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      other = error;
    }
    if (long || other) this.#bad.push({ line, long, other });
  }
}

function tooLong(line, text) {
  if (text.length <= LIMITS.text || characters(text) <= LIMITS.text) return null;
  return new Refused(TOO_LONG, `The phrase at line ${count(line)} has ${count(characters(text))} `
    + `characters which is larger than the permitted maximum of ${count(LIMITS.text)} characters.`);
}

function classNames(line, text, fields) {
  if (!text) throw malformed(`The 'text' value at line ${count(line)} and column 1 is 'empty'.`);
  const names = fields.slice(1).map((field, at) => className(line, at + 2, field)).filter(Boolean);
  if (!names.length) {
    throw malformed(`The 'class' value at line ${count(line)} and column 2 is 'null'.${hint(fields)}`);
  }
  return [...new Set(names)];
}

/** The classes before the last that are after a space, if the last is not: see commas.py. */
function spacedClasses(fields) {
  const filled = fields.slice(1).filter((field) => strip(field));
  if (!filled.length || filled.at(-1).startsWith(" ")) return [];
  return filled.filter((field) => field.startsWith(" ")).map((field) => className(0, 0, field));
}

const HEADER_TEXTS = new Set(["text", "phrase", "sentence", "utterance", "question", "query", "message"]);
const HEADER_CLASSES = new Set(["class", "class_name", "label", "labels", "category", "intent", "target"]);

/** What tells mistakes from training data as it should be. */
class Signs {
  #texts = new Set();
  #several = []; // rows of several classes
  #ends = new Set(); // classes that are the last of a row
  #lines = new Map(); // where each class is first
  #first = null;
  #likeFirst = 0; // rows of the same classes

  add(line, text, names, spaced) {
    this.#texts.add(text);
    if (names.length > 1) this.#several.push({ line, names, spaced });
    this.#ends.add(names.at(-1));
    for (const name of names) if (!this.#lines.has(name)) this.#lines.set(name, line);
    const key = [...names].sort().join("\n"); // no class has a line end
    this.#first ??= { line, text, names, key };
    if (key === this.#first.key) this.#likeFirst++;
  }

  warnings({ rows, classes }) {
    const found = [];
    if (this.#isHeader()) {
      found.push("The first row looks like a header; it is taken as a row. Remove it if it is one.");
    }
    const [texts, names] = [this.#texts.size, classes.size];
    // Texts are mostly different, and classes come again: here it is the other way round.
    if (2 * texts <= rows && 2 * names >= rows && names >= 2 * texts) {
      const columns = `${count(texts)} different values in the first column, ${count(names)} classes`;
      found.push(`Text and class seem to be swapped: ${columns}. The text comes first, then the class.`);
    } else {
      found.push(...this.#commas(rows, classes));
    }
    return found;
  }

  #isHeader() {
    const { text, names } = this.#first;
    const named = HEADER_TEXTS.has(text.toLowerCase())
      || names.some((name) => HEADER_CLASSES.has(name.toLowerCase()));
    return named && this.#likeFirst === 1;
  }

  /** A comma in a text that is not in quotes makes a class of the rest of the text: see commas.py. */
  #commas(rows, classes) {
    const found = [];
    const ask = "Is there a comma in the text? Then put the text in quotes.";
    // A header row has classes of its own, and is warned of already.
    const several = this.#several.filter(({ line }) => line !== this.#first.line || !this.#isHeader());
    const common = [...classes].find(([, its]) => its >= 0.9 * rows)?.[0];
    if (several.length && classes.size > 2 && common !== undefined) {
      found.push(`The class “${shorten(common)}” is on nearly every row, beside others (line `
        + `${count(several[0].line)}). ${ask}`);
    }
    const [alone, after] = [[], []];
    for (const { line, names, spaced } of several) {
      const only = names.find((name) => classes.get(name) === 1);
      // A class that ends a row is meant as one. Of the common one all is said.
      const rest = spaced.find((name) => !this.#ends.has(name) && name !== common);
      if (only !== undefined) alone.push([line, only]);
      else if (rest !== undefined) after.push([line, rest]);
    }
    for (const [spilt, sign] of [[alone, "one of them in no other row"], [after, "one after a space"]]) {
      if (!spilt.length) continue;
      const [line, name] = spilt[0];
      const subject = spilt.length === 1 ? "1 row has" : `${count(spilt.length)} rows have`;
      found.push(`${subject} several classes, ${sign}; the first is line ${count(line)}, `
        + `class “${shorten(name)}”. ${ask}`);
    }
    const lone = [...classes].filter(([, its]) => its === 1).map(([name]) => name);
    if (!found.length && 2 * lone.length > rows) {
      found.push(`${count(lone.length)} of ${count(classes.size)} classes have one row each; the first is `
        + `line ${count(this.#lines.get(lone[0]))}, class “${shorten(lone[0])}”. ${ask}`);
    }
    return found;
  }
}

const shorten = (text) => (characters(text) > 40 ? `${[...text].slice(0, 40).join("")}…` : text);

function comma(line, at) {
  const found = line.indexOf(",", at);
  return found < 0 ? line.length : found;
}

function className(line, column, field) {
  const where = `at line ${count(line)} and column ${column}`;
  if (CLASS_BREAKS.test(strip(field))) throw malformed(`The 'class' value ${where} has a tab or a line end.`);
  const name = strip(strip(field).replace(CLASS_CONTROLS, " ").normalize("NFC"));
  if (name.length > LIMITS.name && characters(name) > LIMITS.name) {
    throw new Refused("Class too long", `The class ${where} has ${count(characters(name))} characters `
      + `which is larger than the permitted maximum of ${count(LIMITS.name)} characters.`);
  }
  return name;
}

function hint(fields) {
  if (fields.length > 1) return "";
  const found = [[";", "';'"], ["\t", "a tab"]].find(([separator]) => strip(fields[0]).includes(separator));
  return found ? ` Are the columns separated by ${found[1]}? Use commas.` : "";
}

// ---- server-sent events, read by fetch: EventSource sends no headers

/** The events in a stream of bytes: {id, event, data}. */
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await received(reader.read());
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => {
        const colon = line.indexOf(": ");
        return [line.slice(0, colon), line.slice(colon + 2)];
      }));
      if (fields.event) yield { ...fields, data: JSON.parse(fields.data) };
    }
  }
}

// ---- the API

const KEY = "slipstream.key";

class Failed extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** What is read of an answer; a connection that breaks meanwhile, in words of our own. */
async function received(reading) {
  try {
    return await reading;
  } catch (error) {
    if (error.name === "AbortError" || error instanceof SyntaxError) throw error;
    throw new Failed(0, "The connection to the service broke.");
  }
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    // Without "omit" a browser answers 401 with a password dialog of its own.
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed(0, "The service does not answer. Is it running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) {
    askForKey();
    if (!key) throw new Failed(401, "This service needs an API key; its operator has one for you.");
  }
  const words = [body.error ?? `Error ${response.status}`, body.description].filter(Boolean).join(". ");
  throw new Failed(response.status, words);
}

const json = async (path, options) => received((await request(path, options)).json());
const post = (path) => json(path, { method: "POST" });
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// ---- the document

const at = (id) => document.getElementById(id);
const show = (id, shown) => { at(id).hidden = !shown; };
const share = (value) => `${(100 * value).toFixed(1)}%`;
const figure = (value) => (value == null ? "–" : value.toFixed(3));

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function say(text) {
  at("message").textContent = text;
  show("message", Boolean(text));
}

/** Run a handler; what fails is shown. */
const guarded = (handler) => async (event) => {
  event?.preventDefault?.();
  say("");
  try {
    await handler(event);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
};

function askForKey() {
  show("key-form", true);
  show("forget-key", Boolean(sessionStorage.getItem(KEY)));
}

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ---- a new classifier

let chosen = null; // the file and its TrainingData, once it was read to its end
let sendKey = null; // the same upload sent again after a broken connection makes one classifier

/** What the operator permits; of a service that does not say it, the defaults. */
async function learnLimits() {
  const its = await json("api/limits").catch(() => null);
  if (!its) return;
  LIMITS.rows = [its.min_rows, its.max_rows];
  LIMITS.classes = [its.min_classes, its.max_classes];
  [LIMITS.text, LIMITS.name] = [its.text_chars, its.class_chars];
}

async function check(file) {
  await learnLimits();
  const data = new TrainingData();
  const reader = file.stream().getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done || !data.feed(value)) break;
  }
  await reader.cancel();
  data.end();
  return data;
}

/** An operator may have raised what is "most" here: the service decides. */
function summary({ rows, classes: { size } }) {
  const [[, mostRows], [, mostClasses]] = [LIMITS.rows, LIMITS.classes];
  if (rows > mostRows) return `more than ${count(mostRows)} rows. The service may refuse it.`;
  const found = `${count(rows)} rows, ${count(size)} classes.`;
  return size > mostClasses ? `${found} More than ${count(mostClasses)}: the service may refuse it.` : found;
}

let suggested = ""; // the name that the page has filled in

async function choose() {
  const file = at("file").files[0];
  chosen = sendKey = null;
  at("cut").checked = false;
  showChosen();
  if (!file) return;
  showCheck(`${file.name}: reading…`);
  try {
    const data = await check(file);
    if (file !== at("file").files[0]) return;
    chosen = { file, data };
    showChosen();
    const name = at("name");
    if (!name.value || name.value === suggested) {
      name.value = suggested = [...file.name.replace(/\.csv$/i, "")].slice(0, LIMITS.name).join("");
    }
  } catch {
    if (file !== at("file").files[0]) return;
    showCheck(`${file.name}: it cannot be read.`, true);
  }
}

function showCheck(text, refused = false) {
  at("check").className = refused ? "refused" : "";
  at("check").textContent = text;
}

/** What was found in the chosen file, and whether it can be sent. */
function showChosen() {
  const { file, data } = chosen ?? {};
  const refused = data && refusalOf(data);
  at("send").disabled = !data || Boolean(refused);
  show("cut-choice", Boolean(data?.long));
  // Long texts can be cut, so what else looks like a mistake is to be seen at once.
  const doubts = data && (!refused || !refusalOf(data, true)) ? data.warnings() : [];
  at("doubts").replaceChildren(...doubts.map((text) => element("li", {}, text)));
  if (!data) return showCheck("");
  const part = `${count(data.long)} of ${count(data.rows)} texts (${share(data.long / data.rows)})`;
  at("cut-help").textContent =
    `${part} have more than ${count(LIMITS.text)} characters. This cuts each after the last whole word that fits.`;
  const way = refused?.error === TOO_LONG ? " To cut long texts, switch on “Cut long texts” below." : "";
  return showCheck(`${file.name}: ${refused?.message ?? summary(data)}${way}`, Boolean(refused));
}

function refusalOf(data, cut = at("cut").checked) {
  try {
    return data.refuse(cut);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return error;
  }
}

async function send() {
  if (!chosen) return;
  sendKey ??= [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join("-");
  const form = new FormData();
  const metadata = { language: at("language").value, name: at("name").value || null };
  form.append("training_metadata", JSON.stringify(metadata));
  form.append("training_data", chosen.file);
  at("send").disabled = true;
  at("send").textContent = "Sending…";
  try {
    const options = { method: "POST", body: form, headers: { "Idempotency-Key": sendKey } };
    const made = await json(`v1/classifiers${at("cut").checked ? "?long=cut" : ""}`, options);
    at("new").reset();
    chosen = sendKey = null;
    showChosen();
    location.hash = made.classifier_id;
  } catch (error) {
    if (error.code !== 0) sendKey = null;
    throw error;
  } finally {
    at("send").disabled = !chosen;
    at("send").textContent = "Train";
  }
}

// ---- all classifiers

/** IBM's API has four statuses. The sentence beside them tells how far training is, and of a cancel. */
export function listStatus({ status, status_description: sentence }) {
  if (status === "Failed" && sentence.endsWith(" cancelled.")) return "Cancelled";
  const progress = status === "Training" && /\((.+)\)$/.exec(sentence);
  return progress ? `${status}, ${progress[1]}` : status;
}

let listed = "";

async function list() {
  const { classifiers } = await json("v1/classifiers");
  // Unchanged, it stays: a reader's place in it is not lost.
  if (listed === JSON.stringify(classifiers) && at("list").childElementCount) return;
  listed = JSON.stringify(classifiers);
  const focused = document.activeElement?.getAttribute("href");
  show("list-empty", !classifiers.length);
  at("list").replaceChildren(...classifiers.map((one) => element(
    "li", {},
    element("a", { href: `#${one.classifier_id}` }, one.name ?? one.classifier_id),
    element("span", { class: "quiet" }, `${listStatus(one)}; ${new Date(one.created).toLocaleString()}`),
  )));
  if (focused?.startsWith("#")) at("list").querySelector(`[href="${focused}"]`)?.focus();
}

// ---- one classifier

let id = null;
let following = new AbortController();
let points = new Map();
let epochs = 1;
let logAt = 0;

async function open() {
  following.abort();
  following = new AbortController();
  const { signal } = following;
  const named = location.hash.slice(1);
  id = /^[0-9a-fx]+-nlc-\d+$/.test(named) ? named : null;
  show("missing", false);
  show("home", !named);
  show("one", id !== null);
  show("forget-key", Boolean(sessionStorage.getItem(KEY)));
  if (!named) return list();
  if (id === null) return showMissing();
  for (const part of ["try", "report", "curve", "cancel", "retry"]) show(part, false);
  for (const part of ["one-facts", "job", "log-text", "sentence", "answers"]) at(part).textContent = "";
  at("sentence").value = "";
  at("one-title").textContent = id;
  at("log").open = false;
  at("one-title").focus();
  try {
    await refresh(signal);
    await follow(signal);
  } catch (error) {
    if (error.code !== 404) throw error;
    showMissing(); // it is another's, or was deleted
  }
  return undefined;
}

function showMissing() {
  id = null;
  show("one", false);
  show("missing", true);
  at("missing-id").textContent = shorten(location.hash.slice(1));
  at("missing-title").focus();
}

async function refresh(signal) {
  const [one, job] = await Promise.all([
    json(`v1/classifiers/${id}`, { signal }), json(`api/classifiers/${id}`, { signal })]);
  at("one-title").textContent = one.name ?? id;
  at("one-facts").textContent = factsText(one, job);
  showJob(job);
  const available = one.status === "Available";
  show("try", available);
  for (const button of document.querySelectorAll("[data-trained]")) button.disabled = !available;
  if (available) showReport(await json(`api/classifiers/${id}/report`, { signal }));
}

export function factsText(one, job) {
  const status = one.status === "Failed" && job.state === "cancelled" ? "Cancelled" : one.status;
  const cut = job.cut ? ` ${count(job.cut)} long ${job.cut === 1 ? "text was" : "texts were"} cut.` : "";
  return `${status}. ${one.classifier_id}, language ${one.language}, made `
    + `${new Date(one.created).toLocaleString()}; ${count(job.rows)} rows, ${count(job.classes)} classes.${cut}`;
}

/** Show the job's events until it ends; after a broken connection, from the last epoch on. */
async function follow(signal) {
  points = new Map();
  let last = null;
  for (let wait = 1000; !signal.aborted; wait = Math.min(2 * wait, 30000)) {
    try {
      const headers = last === null ? {} : { "Last-Event-ID": last };
      const response = await request(`api/classifiers/${id}/events`, { signal, headers });
      for await (const { event, data, id: number } of eventsOf(response.body)) {
        wait = 1000;
        last = number ?? last;
        if (event === "epoch") points.set(data.epoch, data);
        if (event === "progress" && data) showJob(data);
        draw();
        if (event === "end") return refresh(signal);
      }
    } catch (error) {
      if (signal.aborted || (error.code >= 400 && error.code < 500)) throw error;
      at("job").textContent = `${error.message} Trying again…`;
    }
    await pause(wait);
  }
  return undefined;
}

const PREPARING = ["waiting", "reading rows", "building features", "starting learners", "measuring"];

/** What a job does, as a sentence. */
export function jobText(job) {
  const took = job.started && job.finished ? ` in ${duration((job.finished - job.started) / 1000)}` : "";
  return {
    waiting: `Waiting, ${job.ahead} ahead.`,
    running: runningText(job),
    done: `Done${took}.`,
    failed: `Failed: ${job.error}`,
    cancelled: "Cancelled.",
  }[job.state];
}

const isPreparing = (job) => !job.epochs || PREPARING.includes(job.phase);

function runningText(job) {
  const resumed = job.resumed_epoch == null ? "" : ` Continuing from epoch ${job.resumed_epoch}.`;
  const phase = job.phase ? job.phase[0].toUpperCase() + job.phase.slice(1) : "Starting";
  if (isPreparing(job)) {
    return `${phase}${job.phase_percent == null ? "…" : `: ${job.phase_percent}%.`}${resumed}`;
  }
  const bound = job.may_stop_early ? "at most" : "about";
  const left = job.eta_s == null ? "" : `, ${bound} ${duration(job.eta_s)} left`;
  const why = job.stops_early ? ` Stops early: ${job.stops_early}.` : "";
  const last = job.phase === "final pass" ? "Final pass over all rows: " : "";
  return `${last}${job.percent}%${left}; epoch ${job.epoch} of ${job.epochs}, `
    + `${count(Math.round(job.samples_s))} rows a second.${why}${resumed}`;
}

function showJob(job) {
  epochs = Math.max(1, job.epochs ?? 1);
  // A bar without a value moves: something is done, and no one knows how long it takes.
  if (job.state === "running" && isPreparing(job) && !job.percent) at("progress").removeAttribute("value");
  else at("progress").value = job.percent;
  at("job").textContent = jobText(job);
  show("cancel", ["waiting", "running"].includes(job.state));
  show("retry", ["failed", "cancelled"].includes(job.state));
  if (at("log").open && Date.now() - logAt > 5000) showLog();
}

async function showLog() {
  logAt = Date.now();
  const text = at("log-text");
  try {
    const log = await received((await request(`api/classifiers/${id}/log`)).text());
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
    text.textContent = log || "Empty so far.";
    if (atEnd) text.scrollTop = text.scrollHeight;
  } catch (error) {
    text.textContent = error.message;
  }
}

// ---- the curve

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw() {
  const all = [...points.values()].sort((a, b) => a.epoch - b.epoch);
  const losses = all.filter((point) => point.loss != null);
  const held = all.filter((point) => point.held_accuracy != null);
  show("curve", losses.length > 0);
  if (!losses.length) return;
  const plot = at("plot");
  const [width, height] = [plot.clientWidth || 320, plot.clientHeight || 224];
  const [left, right, top, bottom] = [44, width - 40, 24, height - 24];
  const highest = Math.max(...losses.map((point) => point.loss), 1e-6);
  const x = (epoch) => left + (right - left) * Math.min(1, epoch / epochs);
  const y = (part) => bottom - (bottom - top) * part;
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren();
  for (const part of [0, 0.5, 1]) {
    plot.append(
      shape("line", { class: "grid", x1: left, x2: right, y1: y(part), y2: y(part) }),
      shape("text", { x: left - 6, y: y(part) + 4, "text-anchor": "end" }, (part * highest).toFixed(2)),
    );
    if (held.length) plot.append(shape("text", { x: right + 6, y: y(part) + 4 }, `${100 * part}%`));
  }
  plot.append(
    shape("text", { x: left, y: height - 6 }, "0"),
    shape("text", { x: right, y: height - 6, "text-anchor": "end" }, `epoch ${epochs}`),
    shape("text", { x: left, y: 12, class: "loss-label" }, "loss"),
  );
  curve("loss", losses.map((point) => [x(lossEpoch(point, epochs)), y(point.loss / highest)]));
  if (held.length) {
    const label = { x: right, y: 12, class: "accuracy-label", "text-anchor": "end" };
    plot.append(shape("text", label, "held-out accuracy"));
    curve("accuracy", held.map((point) => [x(point.epoch), y(point.held_accuracy)]));
  }
  at("curve-caption").textContent = captionText(losses.at(-1), held.at(-1), epochs);
}

/** A point has the number of epochs that were complete when its own began; its loss is known after that. */
const lossEpoch = (point, most) => Math.min(point.epoch + 1, most);

/** The newest figures. A held-out accuracy that is not of this epoch is shown with its own. */
export function captionText(newest, held, most) {
  const epoch = lossEpoch(newest, most);
  const when = held && held.epoch < epoch ? ` (epoch ${held.epoch})` : "";
  const measured = held ? `, held-out accuracy ${share(held.held_accuracy)}${when}` : "";
  return `Epoch ${epoch}: loss ${newest.loss.toFixed(4)}${measured}.`;
}

function curve(name, places) {
  const plot = at("plot");
  plot.append(shape("polyline", { class: name, points: places.map((place) => place.join()).join(" ") }));
  const [x, y] = places.at(-1);
  plot.append(shape("circle", { class: `${name}-dot`, cx: x, cy: y, r: 3 }));
}

// ---- answers and report

async function classify() {
  const body = JSON.stringify({ text: at("sentence").value });
  const headers = { "Content-Type": "application/json" };
  let classes = []; // bars of an earlier text would be taken for those of one that is refused
  try {
    ({ classes } = await json(`v1/classifiers/${id}/classify`, { method: "POST", headers, body }));
  } finally {
    showAnswers(classes);
  }
}

function showAnswers(classes) {
  at("answers").replaceChildren(...classes.map(({ class_name: name, confidence }) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${100 * confidence}%`;
    return element("li", {},
      element("span", {}, name), element("span", { class: "number" }, figure(confidence)),
      element("span", { class: "track", "aria-hidden": "true" }, bar));
  }));
}

const EXPLAINED = {
  accuracy: "The share of right answers to rows that the classifier had not seen. The fewer these rows, "
    + "the wider the interval: of 20 such measurements, about 19 have the true accuracy in theirs.",
  macroF1: "F1 joins two shares of a class in one number from 0 to 1: how many of the answers with this class "
    + "are right (precision), and how many of its rows are found (recall). Macro F1 is the mean over the classes: "
    + "a rare class counts as much as a frequent one. Far below the accuracy, it says that rare classes are missed.",
  calibration: "How far confidence is from the truth. With an error of 0, 80 of 100 answers with confidence 0.8 "
    + "are right; with 0.1, it is on average 10 more or fewer. “Before” is the error before the confidence was "
    + "fitted to held-out rows.",
};

/** A figure that opens to what it means: by pointer, touch and keyboard. */
function explained(text, meaning) {
  return element("details", { class: "explained" },
    element("summary", {}, text), element("p", { class: "quiet" }, meaning));
}

function showReport(report) {
  show("report", true);
  const figures = [];
  if (report.accuracy != null) {
    const [low, high] = report.interval ?? [];
    const interval = low == null ? "" : ` (95% interval ${figure(low)} to ${figure(high)})`;
    const rows = report.held_out ? ` on ${count(report.held_out)} held-out rows` : "";
    figures.push(explained(`Accuracy ${figure(report.accuracy)}${interval}${rows}`, EXPLAINED.accuracy));
  }
  if (report.macro_f1 != null) {
    figures.push(explained(`Macro F1 ${figure(report.macro_f1)}`, EXPLAINED.macroF1));
  }
  const { ece_before: before, ece_after: after } = report.calibration ?? {};
  if (after != null) {
    const text = `Calibration error ${figure(after)} (${figure(before)} before)`;
    figures.push(explained(text, EXPLAINED.calibration));
  }
  const sentences = [];
  if (report.baseline != null) sentences.push(`The most frequent class is right for ${share(report.baseline)}.`);
  if (report.cut) sentences.push(`${count(report.cut)} of ${count(report.rows)} texts were too long and were cut.`);
  at("report-summary").replaceChildren(
    ...figures, element("p", {}, [...sentences, report.note ?? ""].join(" ")));
  at("warnings").replaceChildren(...(report.warnings ?? []).map((text) => element("li", {}, text)));
  const wrong = (report.confusion ?? []).filter(([truth, answer]) => truth !== answer).slice(0, 20);
  const worst = [...(report.per_class ?? [])].sort((a, b) => (b.rows > 0) - (a.rows > 0) || a.f1 - b.f1);
  const perClass = worst.map((one) => [one.name, one.rows,
    ...[one.precision, one.recall, one.f1].map((value) => (one.rows ? figure(value) : "–"))]);
  const thresholds = (report.thresholds ?? []).map((one) => [
    one.confidence.toFixed(1), share(one.answered), figure(one.accuracy)]);
  at("tables").replaceChildren(
    table("If only answers of at least this confidence are used", ["confidence", "answered", "accuracy"], thresholds),
    table("Worst confusions", ["class", "answered", "rows"], wrong),
    table("Classes, worst first", ["class", "rows", "precision", "recall", "F1"], perClass),
  );
}

const FIGURE = /^([\d.,]+%?|–)$/;

function table(caption, names, rows) {
  if (!rows.length) return "";
  const kinds = names.map((_, column) => (rows.every((row) => FIGURE.test(row[column])) ? "number" : ""));
  const cells = (kind, row) => row.map((cell, column) => element(kind, { class: kinds[column] }, String(cell)));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    element("table", {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...cells("th", names))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))))));
}

// ---- files

/** The name in a Content-Disposition: the one in UTF-8, if there is one. */
function savedName(header) {
  const [, encoded, plain] = header?.match(/filename\*=UTF-8''(\S+)|filename="([^"]+)"$/) ?? [];
  return encoded ? decodeURIComponent(encoded) : plain;
}

async function download({ currentTarget: button }) {
  const response = await request(`api/classifiers/${id}/${button.dataset.download}`);
  const name = savedName(response.headers.get("Content-Disposition")) ?? button.dataset.name;
  const content = await received(response.blob());
  const link = element("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function remove() {
  if (!confirm(`Delete “${at("one-title").textContent}”, its data and its models? This cannot be undone.`)) return;
  following.abort();
  await request(`v1/classifiers/${id}`, { method: "DELETE" });
  location.hash = "";
}

// ---- start

function start() {
  const on = (target, event, handler) => at(target).addEventListener(event, guarded(handler));
  on("key-form", "submit", () => {
    sessionStorage.setItem(KEY, at("key").value.trim());
    at("key").value = "";
    show("key-form", false);
    return open();
  });
  on("forget-key", "click", () => {
    sessionStorage.removeItem(KEY);
    return open();
  });
  on("file", "change", choose);
  at("cut").addEventListener("change", showChosen);
  on("new", "submit", send);
  on("new", "input", () => { sendKey = null; });
  on("cancel", "click", async () => showJob(await post(`api/classifiers/${id}/cancel`)));
  on("retry", "click", async () => {
    await post(`api/classifiers/${id}/retry`);
    return open();
  });
  on("try-form", "submit", classify);
  on("delete", "click", remove);
  at("log").addEventListener("toggle", () => at("log").open && showLog());
  for (const button of document.querySelectorAll("[data-download]")) {
    button.addEventListener("click", guarded(download));
  }
  const drop = at("drop");
  const over = (event) => drop.classList.toggle("over", event.type === "dragover");
  for (const event of ["dragover", "dragleave", "drop"]) drop.addEventListener(event, over);
  // A file that misses the field must not replace the page.
  for (const event of ["dragover", "drop"]) addEventListener(event, (moved) => moved.preventDefault());
  drop.addEventListener("drop", guarded((event) => {
    at("file").files = event.dataTransfer.files;
    return choose();
  }));
  addEventListener("resize", () => id && draw());
  addEventListener("hashchange", guarded(open));
  setInterval(() => id === null && !document.hidden && at("key-form").hidden && list().catch(() => {}), 5000);
  guarded(open)();
}

if (globalThis.document) start();
