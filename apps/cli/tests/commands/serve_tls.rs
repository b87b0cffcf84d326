//! `vdkit serve --tls`, with certificates and with pre-shared keys.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::common::pki::certificates;
use crate::common::{self, Scratch, peer};
use rustix::process::{Pid, Signal, kill_process};
use vdkit_testkit::Killed;

/// A server on a port of its own, killed at the end.
struct Served {
    child: Killed,
    port: String,
}

impl Served {
    fn start(scratch: &Scratch, tls: &str) -> Self {
        let (child, line) = scratch.serve(&["a.qcow2", "--nbd", "tcp:127.0.0.1:0", "--tls", tls]);
        let port = line.trim().trim_end_matches('/').rsplit(':').next().unwrap().to_owned();
        Self { child, port }
    }

    /// qemu-io through TLS with these credentials.
    fn qemu_io(&self, scratch: &Scratch, credentials: &str, commands: &[&str]) -> Output {
        let image = format!(
            "driver=raw,file.driver=nbd,file.host=127.0.0.1,file.port={},file.tls-creds=tls0,\
             file.tls-hostname=localhost",
            self.port
        );
        let mut qemu_io = Command::new("qemu-io");
        qemu_io.current_dir(scratch.folder()).args(["--object", credentials]);
        qemu_io.args(["--image-opts", &image]);
        for command in commands {
            qemu_io.args(["-c", command]);
        }
        qemu_io.output().unwrap()
    }

    /// Writes and reads through TLS, in requests far larger than a record.
    fn works(&self, scratch: &Scratch, credentials: &str) {
        let commands = ["write -P 6 1M 4M", "read -P 6 1M 4M", "flush", "read -P 0 16M 8M"];
        let done = self.qemu_io(scratch, credentials, &commands);
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && !text.contains("failed"), "{done:?}");
    }

    fn refuses(&self, scratch: &Scratch, credentials: &str) {
        let done = self.qemu_io(scratch, credentials, &["read 0 512"]);
        assert!(!done.status.success(), "{credentials}: {done:?}");
    }

    /// Nobody gets in without TLS, and noise in place of it harms nobody.
    fn insists(&self) {
        let plain = Command::new("qemu-io")
            .args(["-f", "raw", &format!("nbd://127.0.0.1:{}", self.port), "-c", "read 0 512"])
            .output()
            .unwrap();
        assert!(!plain.status.success(), "{plain:?}");
        let mut noise = std::net::TcpStream::connect(format!("127.0.0.1:{}", self.port)).unwrap();
        noise.write_all(&[0x16; 500]).unwrap();
    }

    /// Ends it as a user does; the image is sound.
    fn end(mut self, scratch: &Scratch) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        peer(&scratch.folder(), "qemu-img", &["check", "-q", "a.qcow2"]);
    }
}

#[test]
fn certificates_are_shown_and_asked_for() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let served = Served::start(&scratch, "pki");
    let credentials = "tls-creds-x509,id=tls0,dir=pki,endpoint=client";
    served.works(&scratch, credentials);
    served.insists();
    std::fs::remove_file(scratch.path("pki/client-cert.pem")).unwrap();
    std::fs::remove_file(scratch.path("pki/client-key.pem")).unwrap();
    served.refuses(&scratch, credentials);
    served.end(&scratch);
}

const KEY: &str = "6ff1a0c3b8d14e92a7305dbe4c8f1726f0e1d2c3b4a5968778695a4b3c2d1e0f";

fn keys(scratch: &Scratch, folder: &str, text: &str) {
    std::fs::create_dir_all(scratch.path(folder)).unwrap();
    scratch.write(&format!("{folder}/keys.psk"), text.as_bytes());
}

#[test]
#[cfg(feature = "tls-psk")]
fn a_key_that_both_sides_know_opens_the_door() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let other = KEY.replace("6f", "70");
    keys(&scratch, "psk", &format!("# two clients\nalice:{other}\nbob:{KEY}\n"));
    keys(&scratch, "wrong", &format!("bob:{other}\nmallory:{KEY}\n"));
    let served = Served::start(&scratch, "psk");
    let credentials = |dir: &str, who: &str| {
        format!("tls-creds-psk,id=tls0,dir={dir},endpoint=client,username={who}")
    };
    served.works(&scratch, &credentials("psk", "bob"));
    served.works(&scratch, &credentials("psk", "alice"));
    // Another client library, which speaks through another way into GnuTLS.
    let file = scratch.path("psk/keys.psk").display().to_string();
    let uri = format!("nbds://bob@127.0.0.1:{}/?tls-psk-file={file}", served.port);
    let told = peer(&scratch.folder(), "nbdinfo", &[&uri]);
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("with TLS") && told.contains("67108864"), "{told}");
    served.refuses(&scratch, &credentials("wrong", "bob"));
    served.refuses(&scratch, &credentials("wrong", "mallory"));
    served.insists();
    served.works(&scratch, &credentials("psk", "bob"));
    served.end(&scratch);
}

#[test]
#[cfg(feature = "tls-psk")]
fn keys_that_cannot_be_used_are_named_and_not_told() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    keys(&scratch, "psk", &format!("bob:{KEY}\nbob:{KEY}\n"));
    let serve = ["serve", "a.qcow2", "--nbd", "unix:s", "--tls", "psk"];
    let answer = scratch.fails(1, "psk/keys.psk: line 2", &serve);
    assert!(!answer.stderr.contains(&KEY[..8]), "{answer:?}");
    scratch.write("psk/server-cert.pem", b"");
    scratch.fails(1, "another folder", &serve);
    std::fs::remove_file(scratch.path("psk/keys.psk")).unwrap();
    scratch.fails(1, "psk/server-key.pem: there is no such file", &serve);
}

/// Starts a server, which must refuse to serve, and say why.
fn is_refused(scratch: &Scratch, tls: &str, words: &str) {
    let arguments = ["serve", "a.qcow2", "--nbd", "unix:s", "--tls", tls];
    let (mut child, line) = common::started(scratch.command(&arguments).stderr(Stdio::piped()));
    assert_eq!(line, "", "{tls}");
    let mut errors = String::new();
    std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut errors).unwrap();
    assert!(errors.contains(words), "{errors}");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

/// An authority whose file was moved away is a mistake: nobody may come in without a certificate.
/// A list of revoked certificates that is there is heeded, as QEMU's servers do.
#[test]
fn a_revoked_certificate_lets_nobody_in() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let credentials = "tls-creds-x509,id=tls0,dir=pki,endpoint=client";
    let list = |revoke: &str, days: &str| {
        let script = format!(
            "set -e; cd pki; rm -f index*; touch index; echo 01 > number\n\
             printf '[ca]\\ndefault_ca=x\\n[x]\\ndatabase=index\\ncrlnumber=number\\ndefault_md=sha256\\n\\\n\
             certificate=ca-cert.pem\\nprivate_key=ca-key.pem\\n' > ca.cnf\n\
             {revoke}\n\
             openssl ca -config ca.cnf -gencrl {days} -out ca-crl.pem"
        );
        peer(&scratch.folder(), "bash", &["-c", &script]);
    };
    list("", "-crldays 2");
    let served = Served::start(&scratch, "pki");
    served.works(&scratch, credentials);
    served.end(&scratch);
    list("openssl ca -config ca.cnf -revoke client-cert.pem", "-crldays 2");
    let served = Served::start(&scratch, "pki");
    served.refuses(&scratch, credentials);
    served.end(&scratch);
    // A list that has run out says nothing of whom the authority has revoked since.
    list("", "-crl_lastupdate 20200101000000Z -crl_nextupdate 20200102000000Z");
    let served = Served::start(&scratch, "pki");
    served.refuses(&scratch, credentials);
    served.end(&scratch);
}

/// Nothing that is meant to keep clients out is passed over.
#[test]
fn a_list_of_revoked_certificates_that_cannot_be_used_is_an_error() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let arguments = ["serve", "a.qcow2", "--nbd", "tcp:127.0.0.1:0", "--tls", "pki"];
    let refused = |words: &str| {
        let output = scratch.command(&arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{output:?}");
        assert!(text.contains("ca-crl.pem") && text.contains(words), "{text}");
    };
    scratch.write("pki/ca-crl.pem", b"nothing");
    refused("holds no list");
    std::fs::remove_file(scratch.path("pki/ca-cert.pem")).unwrap();
    refused("ca-cert.pem");
    std::fs::remove_file(scratch.path("pki/server-cert.pem")).unwrap();
    keys(&scratch, "pki", &format!("bob:{KEY}\n"));
    refused("keys");
}

#[test]
fn a_dangling_link_as_authority_lets_nobody_in() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    scratch.ok(&["create", "a.qcow2", "1M"]);
    std::fs::remove_file(scratch.path("pki/ca-cert.pem")).unwrap();
    std::os::unix::fs::symlink("nowhere.pem", scratch.path("pki/ca-cert.pem")).unwrap();
    is_refused(&scratch, "pki", "pki/ca-cert.pem");
    // Keys, too: certificates beside a link to them are not what was meant.
    std::fs::remove_file(scratch.path("pki/ca-cert.pem")).unwrap();
    std::os::unix::fs::symlink("nowhere.psk", scratch.path("pki/keys.psk")).unwrap();
    is_refused(&scratch, "pki", "pki/keys.psk");
    std::fs::create_dir(scratch.path("psk")).unwrap();
    std::os::unix::fs::symlink("nowhere.pem", scratch.path("psk/server-cert.pem")).unwrap();
    keys(&scratch, "psk", &format!("bob:{KEY}\n"));
    is_refused(&scratch, "psk", "another folder");
    assert!(!scratch.path("s").exists());
}

#[test]
#[cfg(feature = "tls-psk")]
fn the_uri_of_a_server_with_tls_says_so() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    keys(&scratch, "psk", &format!("bob:{KEY}\n"));
    let arguments = [
        "serve",
        "a.qcow2",
        "--nbd",
        "tcp:127.0.0.1:0",
        "--nbd",
        "unix:s",
        "--tls",
        "psk",
        "--json",
    ];
    let (_child, line) = common::started(&mut scratch.command(&arguments));
    let said: serde_json::Value = serde_json::from_str(&line).unwrap();
    let uris: Vec<&str> =
        said["uris"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap()).collect();
    assert!(uris[0].starts_with("nbds://127.0.0.1:"), "{uris:?}");
    assert_eq!(uris[1], "nbds+unix:///?socket=s");
}
