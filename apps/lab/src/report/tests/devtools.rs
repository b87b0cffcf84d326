//! Controls headless Chromium over its DevTools protocol.
//!
//! The protocol uses two pipes; each message is JSON followed by a zero byte. Source: Chromium,
//! `content/browser/devtools/devtools_pipe_handler.cc`; domains and methods: the documentation of
//! the DevTools Protocol.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use vdkit_testkit::require_peer;

const PROGRAM: &str = "chromium-headless-shell";

pub(super) struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    next: u64,
    /// Events that arrived while the client waited for an answer.
    events: Vec<Value>,
    _folder: TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Browser {
    /// Starts a browser with an empty page. Returns none if Chromium is not installed.
    pub(super) fn start() -> Option<Self> {
        if !require_peer(PROGRAM) {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let [to, from] = ["to", "from"].map(|name| folder.path().join(name));
        for pipe in [&to, &from] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        // The shell opens the pipes as the file descriptors that the browser expects, in this
        // order.
        let line = format!(
            "exec {PROGRAM} --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe \
             --user-data-dir=\"$3\" about:blank 3<\"$1\" 4>\"$2\""
        );
        let child = Command::new("sh")
            .args(["-c", &line, "sh"])
            .args([&to, &from, &folder.path().join("profile")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let to = OpenOptions::new().write(true).open(to).unwrap();
        let from = BufReader::new(File::open(from).unwrap());
        let mut browser =
            Self { child, to, from, session: None, next: 0, events: Vec::new(), _folder: folder };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", target);
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    fn receive(&mut self) -> Value {
        let mut message = Vec::new();
        self.from.read_until(0, &mut message).unwrap();
        assert_eq!(message.pop(), Some(0), "the browser has ended");
        serde_json::from_slice(&message).unwrap()
    }

    /// Calls a method and waits for its result.
    pub(super) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap();
        loop {
            let mut answer = self.receive();
            if answer["id"] == self.next {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    /// Waits for an event.
    fn wait_for(&mut self, method: &str) {
        while !self.events.iter().any(|event| event["method"] == method) {
            let event = self.receive();
            self.events.push(event);
        }
    }

    /// Sets the window's size and the system's color scheme.
    pub(super) fn window(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Opens a file and discards earlier complaints.
    pub(super) fn open(&mut self, path: &Path) {
        self.events.clear();
        self.call("Page.navigate", json!({"url": format!("file://{}", path.display())}));
        self.wait_for("Page.loadEventFired");
    }

    /// The value of an expression.
    pub(super) fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", asked);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Presses and releases a key.
    pub(super) fn key(&mut self, key: &str, code: u32, text: &str) {
        for kind in ["keyDown", "keyUp"] {
            let mut event =
                json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Errors of the page, and requests for other resources.
    pub(super) fn complaints(&mut self) -> Vec<String> {
        // Evaluate something: its answer comes after all earlier events.
        self.value("0");
        let told = |event: &Value| {
            let about = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" | "Log.entryAdded" => Some(about.to_string()),
                "Runtime.consoleAPICalled" => Some(about["args"].to_string()),
                "Network.requestWillBeSent" => {
                    let url = about["request"]["url"].as_str()?;
                    (!url.starts_with("file://")).then(|| format!("request for {url}"))
                }
                _ => None,
            }
        };
        self.events.iter().filter_map(told).collect()
    }

    /// A PNG of the whole page, or of its first `height` pixels.
    pub(super) fn picture(&mut self, width: u32, height: Option<f64>) -> Vec<u8> {
        let whole = self.value("document.documentElement.scrollHeight").as_f64().unwrap();
        let height = height.unwrap_or(whole).min(whole);
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        let asked = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let answer = self.call("Page.captureScreenshot", asked);
        decoded(answer["data"].as_str().unwrap())
    }
}

/// Decodes base64. Source: RFC 4648, section 4.
fn decoded(text: &str) -> Vec<u8> {
    let (mut bits, mut count, mut bytes) = (0u32, 0, Vec::with_capacity(text.len() / 4 * 3));
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
