// The real Node SDK drives a service: node life_cycle.js URL FORM AUTH [KEY]; prints JSON.
const fs = require("fs");
const NLC = require("ibm-watson/natural-language-classifier/v1");
const auth = require("ibm-watson/auth");

const [url, form, how, key] = process.argv.slice(2);
const authenticators = {
  none: () => new auth.NoAuthAuthenticator(),
  basic: () => new auth.BasicAuthenticator({ username: "apikey", password: key }),
  bearer: () => new auth.BearerTokenAuthenticator({ bearerToken: key }),
  iam: () => new auth.IamAuthenticator({ apikey: key, url }),
};
const csv = fs.readFileSync(0);
const path = process.env.CSV_PATH;
const data = {
  stream: () => fs.createReadStream(path),
  buffer: () => csv,
  string: () => csv.toString(),
};
const metadata = '{"name": "Wetter ü", "language": "en"}';

async function main() {
  const nlc = new NLC({ authenticator: authenticators[how](), serviceUrl: url });
  const out = {};
  const created = await nlc.createClassifier({
    trainingMetadata: form === "string" ? metadata : Buffer.from(metadata),
    trainingData: data[form](),
  });
  out.created = created.result;
  out.transaction = created.headers["x-global-transaction-id"];
  const classifierId = created.result.classifier_id;
  out.listed = (await nlc.listClassifiers()).result;
  for (;;) {
    const { result } = await nlc.getClassifier({ classifierId });
    if (result.status !== "Training") { out.status = result.status; break; }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  out.answer = (await nlc.classify({ classifierId, text: "how hot ü" })).result;
  const collection = [{ text: "rain" }, { text: "hot" }];
  out.answers = (await nlc.classifyCollection({ classifierId, collection })).result;
  out.deleted = (await nlc.deleteClassifier({ classifierId })).result;
  try {
    await nlc.getClassifier({ classifierId });
  } catch (error) {
    out.gone = { code: error.code, message: error.message, body: error.body };
  }
  console.log(JSON.stringify(out));
}

main().catch((error) => {
  console.log(JSON.stringify({ error: error.message, code: error.code, body: error.body }));
  process.exit(1);
});
