//! Which proxy a request goes through, by the variables that most programs follow.

use std::fmt;
use std::net::IpAddr;

use super::Url;

/// The user's proxies and where they are not to be used.
#[derive(Clone, Default)]
pub struct ProxyRules {
    http: Option<String>,
    https: Option<String>,
    direct: Vec<String>,
}

impl ProxyRules {
    /// Reads `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, in lower case or upper case; lower case wins.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| {
            let value = variable(name).or_else(|| variable(&name.to_ascii_uppercase()));
            value.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let all = get("all_proxy");
        let direct = get("no_proxy").unwrap_or_default();
        Self {
            http: get("http_proxy").or_else(|| all.clone()),
            https: get("https_proxy").or(all),
            direct: direct.split([',', ' ']).map(|entry| entry.trim().to_ascii_lowercase()).filter(|entry| !entry.is_empty()).collect(),
        }
    }

    /// The proxy for plain requests.
    pub(super) fn http(&self) -> Option<&str> {
        self.http.as_deref()
    }

    /// The proxy for encrypted requests.
    pub(super) fn https(&self) -> Option<&str> {
        self.https.as_deref()
    }

    /// Whether a request goes straight to its host. This machine is never asked for through a proxy.
    pub fn is_direct(&self, url: &Url) -> bool {
        let proxy = if url.is_secure() { &self.https } else { &self.http };
        proxy.is_none() || url.is_loopback() || self.direct.iter().any(|entry| covers(entry, url))
    }
}

impl fmt::Debug for ProxyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A proxy's address may hold a password.
        let set = |proxy: &Option<String>| proxy.is_some();
        f.debug_struct("ProxyRules")
            .field("http", &set(&self.http))
            .field("https", &set(&self.https))
            .field("direct", &self.direct)
            .finish()
    }
}

/// Whether an entry of `NO_PROXY` covers a host: `*`, a domain with all below it, an address, a network, each with
/// or without a port.
fn covers(entry: &str, url: &Url) -> bool {
    if entry == "*" {
        return true;
    }
    let host = url.host();
    if let Ok(address) = host.parse::<IpAddr>() {
        if let Some((network, bits)) = entry.split_once('/') {
            return matches!((network.parse::<IpAddr>(), bits.parse::<u32>()), (Ok(network), Ok(bits)) if in_network(address, network, bits));
        }
        if entry.parse::<IpAddr>().is_ok_and(|entry| entry == address) {
            return true;
        }
    }
    let (name, port) = match entry.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name.trim_matches(['[', ']']), port.parse::<u16>().ok()),
        _ => (entry, None),
    };
    if port.is_some_and(|port| port != url.port()) {
        return false;
    }
    let name = name.strip_prefix('*').unwrap_or(name);
    let name = name.strip_prefix('.').unwrap_or(name);
    !name.is_empty() && (host == name || host.strip_suffix(name).is_some_and(|rest| rest.ends_with('.')))
}

fn in_network(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            u32::from(a) & mask == u32::from(n) & mask
        }
        (IpAddr::V6(a), IpAddr::V6(n)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            u128::from(a) & mask == u128::from(n) & mask
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(pairs: &'static [(&'static str, &'static str)]) -> ProxyRules {
        ProxyRules::from_variables(&|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    fn url(text: &str) -> Url {
        Url::parse(text).expect("parses").url
    }

    #[test]
    fn lower_case_wins_and_all_proxy_fills_in() {
        let rules = rules(&[("https_proxy", "http://low"), ("HTTPS_PROXY", "http://up"), ("ALL_PROXY", "http://u:p@all")]);
        assert_eq!(rules.https(), Some("http://low"));
        assert_eq!(rules.http(), Some("http://u:p@all"));
        assert!(!format!("{rules:?}").contains("u:p"));
    }

    #[test]
    fn no_proxy_covers_domains_addresses_and_networks() {
        let rules = rules(&[
            ("ALL_PROXY", "http://p"),
            ("NO_PROXY", "example.org, .corp,*.wild.net,10.0.0.0/8,192.168.1.1,[fd00::1]:8080,port.net:81,fe80::/10"),
        ]);
        for direct in [
            "https://example.org/",
            "https://a.example.org/",
            "http://x.corp/",
            "http://a.wild.net/",
            "http://10.9.8.7/",
            "http://192.168.1.1:99/",
            "http://[fd00::1]:8080/",
            "http://port.net:81/",
            "http://[fe80::5]/",
            "http://localhost:1/",
            "http://[::1]/",
        ] {
            assert!(rules.is_direct(&url(direct)), "{direct}");
        }
        for proxied in ["https://notexample.org/", "http://11.0.0.1/", "http://port.net/", "https://example.org.evil/"] {
            assert!(!rules.is_direct(&url(proxied)), "{proxied}");
        }
        assert!(ProxyRules::default().is_direct(&url("https://example.org/")));
    }
}
