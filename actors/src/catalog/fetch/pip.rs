//! pip's settings, so that who can `pip install` can fetch models: index addresses and certificates from variables
//! and configuration files.

use std::path::{Path, PathBuf};

/// Longest configuration file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// What of pip's settings matters here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PipSettings {
    /// `index-url`, where set.
    pub(crate) index_url: Option<Secret>,
    /// `extra-index-url`, in order.
    pub(crate) extra_index_urls: Vec<Secret>,
    /// `no-index`.
    pub(crate) no_index: bool,
    /// `cert`.
    pub(crate) cert: Option<PathBuf>,
}

/// An address that may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl PipSettings {
    /// Reads the files, those that count least first, then the variables, which count most.
    pub(crate) fn read(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Self {
        let mut settings = Self::default();
        for path in files(variable, home) {
            let small = std::fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() <= FILE_BYTES_MAX);
            if let Some(text) = small.then(|| std::fs::read(&path).ok()).flatten() {
                settings.apply_file(&String::from_utf8_lossy(&text));
            }
        }
        for (name, key) in
            [("PIP_INDEX_URL", "index-url"), ("PIP_EXTRA_INDEX_URL", "extra-index-url"), ("PIP_NO_INDEX", "no-index"), ("PIP_CERT", "cert")]
        {
            if let Some(value) = variable(name).filter(|value| !value.trim().is_empty()) {
                settings.apply(key, &value);
            }
        }
        settings
    }

    /// Takes one file over what is set. `[global]` counts less than the section of the command.
    pub(crate) fn apply_file(&mut self, text: &str) {
        for wanted in ["global", "install", "download"] {
            for (section, key, value) in entries(text) {
                if section == wanted {
                    self.apply(&key, &value);
                }
            }
        }
    }

    fn apply(&mut self, key: &str, value: &str) {
        match key {
            "index-url" => self.index_url = value.split_whitespace().next().map(|url| Secret(url.to_owned())),
            "extra-index-url" => self.extra_index_urls = value.split_whitespace().map(|url| Secret(url.to_owned())).collect(),
            "no-index" => self.no_index = matches!(value.trim().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on" | "y" | "t"),
            "cert" => self.cert = Some(PathBuf::from(value.trim())),
            _ => {}
        }
    }
}

/// The files that pip reads, those that count least first.
fn files(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Vec<PathBuf> {
    let get = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let chosen = get("PIP_CONFIG_FILE");
    if chosen.as_deref() == Some(Path::new("/dev/null")) {
        return Vec::new();
    }
    let mut paths = Vec::new();
    if cfg!(windows) {
        paths.extend(get("PROGRAMDATA").map(|folder| folder.join("pip/pip.ini")));
        paths.extend(home.map(|home| home.join("pip/pip.ini")));
        paths.extend(get("APPDATA").map(|folder| folder.join("pip/pip.ini")));
        paths.extend(get("VIRTUAL_ENV").map(|folder| folder.join("pip.ini")));
    } else {
        let shared = variable("XDG_CONFIG_DIRS").filter(|value| !value.is_empty()).unwrap_or_else(|| "/etc/xdg".to_owned());
        paths.extend(shared.split(':').map(|folder| Path::new(folder).join("pip/pip.conf")));
        if cfg!(target_os = "macos") {
            paths.push(PathBuf::from("/Library/Application Support/pip/pip.conf"));
        }
        paths.push(PathBuf::from("/etc/pip.conf"));
        paths.extend(home.map(|home| home.join(".pip/pip.conf")));
        if cfg!(target_os = "macos") {
            paths.extend(home.map(|home| home.join("Library/Application Support/pip/pip.conf")));
        }
        paths.extend(get("XDG_CONFIG_HOME").or_else(|| home.map(|home| home.join(".config"))).map(|folder| folder.join("pip/pip.conf")));
        paths.extend(get("VIRTUAL_ENV").map(|folder| folder.join("pip.conf")));
    }
    paths.extend(chosen);
    paths
}

/// The entries of a configuration file as Python's `configparser` reads it: sections, `key = value` or `key: value`,
/// values that go on in indented lines, comments on lines of their own.
fn entries(text: &str) -> Vec<(String, String, String)> {
    let mut entries: Vec<(String, String, String)> = Vec::new();
    let mut section = String::new();
    let mut open = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if open && line.starts_with([' ', '\t']) {
            if let Some((_, _, value)) = entries.last_mut() {
                value.push('\n');
                value.push_str(trimmed);
            }
        } else if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.trim().to_owned();
            open = false;
        } else if let Some((key, value)) = trimmed.split_once(['=', ':']) {
            entries.push((section.clone(), key.trim().to_ascii_lowercase().replace('_', "-"), value.trim().to_owned()));
            open = true;
        } else {
            open = false;
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_pip_does() {
        let mut settings = PipSettings::default();
        settings.apply_file(
            "# company\n[global]\nindex-url = https://u:p@a/simple\nextra-index-url =\n    https://b/simple\n    ; not this\n    https://c/simple\ncert: /ca.pem\n[list]\nindex-url = https://no\n[install]\nindex_url=https://d/simple\n",
        );
        assert_eq!(settings.index_url, Some(Secret("https://d/simple".into())));
        assert_eq!(settings.extra_index_urls, [Secret("https://b/simple".into()), Secret("https://c/simple".into())]);
        assert_eq!(settings.cert, Some("/ca.pem".into()));
        assert!(!format!("{settings:?}").contains("simple"));
    }

    #[cfg(unix)]
    #[test]
    fn user_counts_more_than_shared_and_variables_most() {
        let home = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(home.path().join(".config/pip")).expect("makes");
        std::fs::write(home.path().join(".config/pip/pip.conf"), "[global]\nindex-url = https://user\nno-index = yes\n").expect("writes");
        let only_home = |name: &str| (name == "XDG_CONFIG_DIRS").then(|| "/nowhere".to_owned());
        let settings = PipSettings::read(&only_home, Some(home.path()));
        assert_eq!(settings.index_url, Some(Secret("https://user".into())));
        assert!(settings.no_index);
        let variable = |name: &str| (name == "PIP_INDEX_URL").then(|| "https://variable".to_owned());
        assert_eq!(PipSettings::read(&variable, Some(home.path())).index_url, Some(Secret("https://variable".into())));
        let none = |name: &str| (name == "PIP_CONFIG_FILE").then(|| "/dev/null".to_owned());
        assert_eq!(PipSettings::read(&none, Some(home.path())), PipSettings::default());
    }
}
