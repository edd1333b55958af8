// The real Node SDK with retries on: node retries.js URL REQUESTS; prints JSON.
const NLC = require("ibm-watson/natural-language-classifier/v1");
const { NoAuthAuthenticator } = require("ibm-watson/auth");

async function main([serviceUrl, requests]) {
  const nlc = new NLC({ authenticator: new NoAuthAuthenticator(), serviceUrl });
  nlc.enableRetries({ maxRetries: 10, maxRetryInterval: 30 });
  const answers = [];
  while (answers.length < Number(requests)) answers.push((await nlc.listClassifiers()).result);
  console.log(JSON.stringify({ answers }));
}

main(process.argv.slice(2)).catch((error) => {
  console.log(JSON.stringify({ error: error.message, code: error.code, body: error.body }));
  process.exit(1);
});
